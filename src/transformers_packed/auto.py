"""Importing this module calls [`register`]: for programs that take the name of a module to import, such as verl.

```bash
python -m verl.trainer.main_ppo actor_rollout_ref.model.external_lib=transformers_packed.auto ...
```
"""

from .models.registry import register


register()
