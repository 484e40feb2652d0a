"""Loading of quantized checkpoints in the bits of their files. It imports all quantizers of Transformers."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from .checkpoint_formats import TENSORS, PackedWeight, stored_weight
from .checkpoint_kinds import kept_by, quantizes_inputs, stored_as
from .families import EXPERT_WEIGHTS
from .quantized_weights import dequantize


logger = logging.get_logger(__name__)


class CheckpointConfig(QuantizationConfigMixin):
    """The `quantization_config` of a checkpoint as it is in the file."""

    def __init__(self, **values: Any):
        self.values, self.quant_method = values, values["quant_method"]

    def __getattr__(self, name: str) -> Any:
        # PEFT reads some of them.
        try:
            return vars(self)["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


class CheckpointQuantizer(HfQuantizer):
    """Loads the weights of a checkpoint as [`PackedWeight`].

    Each weight tells its format by its tensors. Weights that are not quantized load as usual.
    """

    requires_calibration = True
    is_trainable = True
    serialized_names = {"weight": TENSORS}
    quantization_config: CheckpointConfig

    def __init__(self, quantization_config: CheckpointConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.read: set[str] = set()
        self.described = SimpleNamespace(quantization_config=quantization_config.values)
        stored = stored_as(self.described)
        assert stored is not None, "Transformers looks the quantizer up by its method"
        self.stored = stored
        logger.info(f"The weights stay in {self.stored.title}.")
        if quantizes_inputs(self.described):
            logger.warning_once("Servers of this checkpoint quantize inputs of layers, too. Training does not.")

    def is_serializable(self) -> bool:
        # An adapter is what training makes. The base is the checkpoint.
        return False

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {"deserialize": _Read, "dequantize": _Read}

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.is_kept = kept_by(self.described, model)
        return model

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        # `device_map="auto"` counts them.
        path, _, name = param_name.rpartition(".")
        linear = name == "weight" and isinstance(model.get_submodule(path), torch.nn.Linear)
        is_stored = param_name.endswith(EXPERT_WEIGHTS) or (linear and not self.is_kept(path))
        return self.stored.bytes if is_stored else param.element_size()

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        head = model.get_output_embeddings()
        for name in sorted(self.read):
            weight, module = model.get_parameter(name), model.get_submodule(name.rpartition(".")[0])
            weight.requires_grad_(False)
            is_layer = isinstance(module, torch.nn.Linear) and module is not head
            if isinstance(weight, PackedWeight) and not is_layer and not name.endswith(EXPERT_WEIGHTS):
                # The loss without logits reads a plain head, and embeddings are looked up.
                module.weight = torch.nn.Parameter(weight.compute(), requires_grad=False)
            elif not isinstance(weight, PackedWeight):
                dtype = str(weight.dtype).removeprefix("torch.")
                logger.warning(
                    f"{name} is in {dtype}, because this model joins the weights of the checkpoint otherwise."
                )
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        dequantize(model, dtype)
        return model


class _Read(ConversionOps):
    """Read the weight of a layer, or those of experts before they are joined, from the tensors of the checkpoint."""

    # Transformers finds the quantizer by this name, and then does not cast the tensors.
    def __init__(self, quantizer: CheckpointQuantizer):
        self.hf_quantizer = quantizer

    def __deepcopy__(self, memo: dict) -> "_Read":
        # Transformers copies the operation for each weight. The names that it reads are for one set.
        return self

    @torch.no_grad()
    def convert(self, input_dict: dict, model: Any, full_layer_name: str, **kwargs: Any) -> dict:  # type: ignore[override]
        layers: dict[str, dict[str, list]] = defaultdict(dict)
        for pattern, values in input_dict.items():
            layer, _, name = pattern.rpartition(".")
            layers[layer][name] = values if isinstance(values, list) else [values]
        dtype, config = model.get_parameter(full_layer_name).dtype, self.hf_quantizer.quantization_config
        found: dict[str, Any] = {}
        for layer, tensors in layers.items():
            each = [dict(zip(tensors, values, strict=True)) for values in zip(*tensors.values(), strict=True)]
            weights = [stored_weight(x, config.values, dtype) for x in each]
            if any(isinstance(x, PackedWeight) for x in weights):
                self.hf_quantizer.read.add(full_layer_name)
            found |= {f"{layer}.weight": weights} if layer else {full_layer_name: weights[0]}
        return found
