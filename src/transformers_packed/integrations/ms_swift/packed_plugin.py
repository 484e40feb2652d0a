"""The file for ms-swift's option `--external_plugins`. ms-swift imports it without its package."""

import transformers_packed.integrations.ms_swift.packed_hooks  # noqa: F401
