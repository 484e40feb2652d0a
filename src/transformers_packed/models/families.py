"""The records of all model families: how each keeps documents apart, or why it cannot.

Families with classes of their own have their record beside them. For each other family, one line in a table is enough.
"""

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import overload

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

from ..errors import alternatives, input_error
from .bailing_hybrid.family import BAILING_HYBRID
from .family import Family, Isolated, Mixer, Mixers, Refused, Unpacked
from .kimi_linear.family import KIMI_LINEAR
from .olmo_hybrid.family import OLMO_HYBRID
from .qwen3_5.family import QWEN3_5
from .qwen3_5_moe.family import QWEN3_5_MOE
from .qwen3_next.family import QWEN3_NEXT
from .qwen4_exp.family import QWEN4_EXP
from .sizes import Sizes


# Suffixes of the names of classes whose loss is over tokens.
LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
# Of rows, and of tokens.
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
_OURS = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, OLMO_HYBRID, KIMI_LINEAR, BAILING_HYBRID, QWEN4_EXP)
# Families with classes of this package, in this release of Transformers.
OWN = tuple(family for family in _OURS if family.is_supported)
# Those whose sizes are known, for which rows, memory and parts of rows can be planned.
SIZED = tuple(family for family in OWN if family.sizes is not None)
# Their classes of experts, and the weights of these, for `target_parameters` of PEFT.
EXPERT_CLASSES = frozenset(family.experts for family in OWN if family.experts)
EXPERT_WEIGHTS = ("experts.gate_up_proj", "experts.down_proj")


def titles(families: Iterable[Family] = OWN) -> str:
    """Return the names of families in texts: "A, B or C"."""
    return alternatives([family.title for family in families])


_PLAIN = Mixer()
_ATTENTION = Mixer(masked=True)
_CONV = Mixer(keywords=("seq_idx",), kernels=("causal_conv1d_fn",))
_MAMBA = Mixer(row="mamba")
_MAMBA2 = Mixer(row="mamba2")
_SHORT_CONV = Mixer(row="short_conv")
# Attention over a mask for the whole row takes longer than over the documents.
_MASKED_ROW = Mixer(row="causal_attention", keeps_apart=True)
_GATED_DELTA = Mixer(
    keywords=("cu_seq_lens_q", "seq_idx"), kernels=("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
)
_KIMI_DELTA = Mixer(keywords=("cu_seqlens", "seq_idx"), kernels=("causal_conv1d_fn", "chunk_kimi_delta_attention"))

_MIXERS: dict[str, dict[str, Mixer]] = {
    "bamba": {"BambaMixer": _MAMBA2, "BambaAttention": _MASKED_ROW},
    "falcon_h1": {"FalconH1Mixer": _MAMBA2, "FalconH1Attention": _MASKED_ROW},
    "falcon_mamba": {"FalconMambaMixer": _MAMBA},
    # No module needs replacing. It is enough to disable the cache of the text model, which mixes documents with one.
    "fuyu": {},
    "got_ocr2": {},
    # Compressed keys pool groups of tokens that are counted from the start of the row.
    "deepseek_v4": {"DeepseekV4Attention": _ATTENTION},
    # The attention's indexer pools and selects tokens across the whole row.
    "glm5_next": {"Glm5NextTextLinearAttention": _KIMI_DELTA, "Glm5NextTextAttention": Mixer(outputs=(0, 2))},
    # Its attention receives no position ids, so it cannot detect documents.
    "granitemoehybrid": {
        "GraniteMoeHybridMambaLayer": _MAMBA2,
        "GraniteMoeHybridAttention": Mixer(masked=True, row="causal_attention"),
    },
    # Its attention scales queries by their index in the row.
    "inkling": {"InklingShortConvolution": _CONV, "InklingAttention": _ATTENTION},
    "inkling2": {"Inkling2ShortConvolution": _CONV, "Inkling2DynamicShortConvolution": _PLAIN},
    "inkling2_loop": {"Inkling2LoopShortConvolution": _CONV, "Inkling2LoopDynamicShortConvolution": _PLAIN},
    "jamba": {"JambaMambaMixer": _MAMBA, "JambaAttention": _MASKED_ROW},
    "lara_mini": {"LaraMiniGatedDeltaNet": _GATED_DELTA},
    "lfm2": {"Lfm2ShortConv": _SHORT_CONV, "Lfm2Attention": _MASKED_ROW},
    "lfm2_moe": {"Lfm2MoeShortConv": _SHORT_CONV, "Lfm2MoeAttention": _MASKED_ROW},
    "lfm3": {"Lfm3ShortConv": _SHORT_CONV},
    "mamba": {"MambaMixer": _MAMBA},
    "mamba2": {"Mamba2Mixer": _MAMBA2},
    "minimax": {"MiniMaxLightningAttention": _PLAIN},
    "nemotron_h": {"NemotronHMamba2Mixer": _MAMBA2, "NemotronHAttention": _MASKED_ROW},
    "recurrent_gemma": {"RecurrentGemmaRecurrentBlock": _PLAIN},
    "rwkv": {"RwkvSelfAttention": _PLAIN, "RwkvFeedForward": _PLAIN},
    "xlstm": {"xLSTMLayer": _PLAIN},
    "zamba": {"ZambaMambaMixer": Mixer(row="zamba")},
    "zamba2": {"Zamba2MambaMixer": _MAMBA2},
    "zaya": {"ZayaCCAProjection": Mixer(outputs=(0, 1, 2))},
}

_MASKS = "its attention mask ignores position ids"
_DECODER = "the decoder creates masks and positions without position ids"

_UNPACKED = {
    "afmoe": Unpacked("AfmoeModel", _MASKS),
    "bart": Unpacked("BartDecoder", _DECODER, shifts_labels=False),
    "bigbird_pegasus": Unpacked("BigBirdPegasusDecoder", _DECODER, shifts_labels=False),
    "biogpt": Unpacked("BioGptModel", _MASKS),
    "blenderbot": Unpacked("BlenderbotDecoder", _DECODER, shifts_labels=False),
    "blenderbot_small": Unpacked("BlenderbotSmallDecoder", _DECODER, shifts_labels=False),
    "bloom": Unpacked("BloomModel", _MASKS),
    "falcon": Unpacked("FalconModel", _MASKS),
    "gpt_oss": Unpacked("GptOssModel", _MASKS),
    "marian": Unpacked("MarianDecoder", _DECODER, shifts_labels=False),
    "mbart": Unpacked("MBartDecoder", _DECODER, shifts_labels=False),
    "minimax_m3_vl": Unpacked("MiniMaxM3VLTextModel", "its sparse attention scores blocks of the whole row"),
    "moss_transcribe_diarize": Unpacked("MossTranscribeDiarizeModel", "it passes no position ids to its text model"),
    "mpt": Unpacked("MptModel", _MASKS),
    "mvp": Unpacked("MvpDecoder", _DECODER, shifts_labels=False),
    "openai": Unpacked("OpenAIGPTModel", "its attention uses its own causal mask"),
    "opt": Unpacked("OPTDecoder", _MASKS),
    "pegasus": Unpacked("PegasusDecoder", _DECODER, shifts_labels=False),
    "plbart": Unpacked("PLBartDecoder", _DECODER, shifts_labels=False),
    "trocr": Unpacked("TrOCRDecoder", _DECODER, shifts_labels=False),
    "xglm": Unpacked("XGLMModel", _MASKS),
}

# Measured with `audit_model` on tiny models.
_ISOLATED = """
apertus apertus1p5 arcee aria axk1 axk2 beam bitnet codegen cohere cohere2 cohere2_moe
cohere_compass ctrl cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 diffllama dory dots1 dots3_note
emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3 gemma3n gemma4
gemma4_unified git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox
gpt_neox_japanese gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax jais2 jetmoe kolibri1 laguna llama
llama4 longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral
mllama modernbert_decoder moshi nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3
phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm
starcoder2 vaultgemma whisper youtu
""".split()

_BOTH_WAYS = "its attention is bidirectional unless it is configured as a decoder, which was never audited"

_REFUSED = {
    **dict.fromkeys(
        """
        bert bert_generation big_bird camembert data2vec electra ernie megatron_bert rembert roberta
        roberta_prelayernorm roc_bert roformer xlm xlm_roberta xlm_roberta_xl xmod
        """.split(),
        _BOTH_WAYS,
    ),
    "blt": "its patches span the bytes of the whole row",
    "cpmant": "its attention is bidirectional",
    "doge": "its attention selects keys from the whole row, including later ones",
    "gemma4_assistant": "it drafts for another model and reads its cache",
    "gemma4_unified_assistant": "it drafts for another model and reads its cache",
    "musicgen": "it predicts several audio codes per step",
    "musicgen_melody": "it predicts several audio codes per step",
    "prophetnet": "it predicts several tokens ahead and is not causal",
    "reformer": "its attention sorts the tokens of the whole row",
    "xlnet": "its attention is bidirectional",
}

_TABLES = (
    {name: Mixers(classes) for name, classes in _MIXERS.items()},
    _UNPACKED,
    dict.fromkeys(_ISOLATED, Isolated()),
    {name: Refused(why) for name, why in _REFUSED.items()},
)
# All records, by name.
FAMILIES: dict[str, Family] = {
    family.name: family
    if family in OWN
    else replace(family, apart=Refused(f"its classes need transformers >= {family.since}"))
    for family in _OURS
} | {name: Family(name, apart) for table in _TABLES for name, apart in table.items()}


def family_named(name: str) -> Family:
    """Return the record of the family with a name, which says no more than the name if nobody has measured it."""
    return FAMILIES.get(name) or Family(name)


@overload
def family_of(asked: PreTrainedConfig | str) -> Family: ...
@overload
def family_of(asked: torch.nn.Module | type) -> Family | None: ...
def family_of(asked: torch.nn.Module | PreTrainedConfig | type | str) -> Family | None:
    """Return the family of a model, a configuration, a model type or a class.

    That of a class is that of the first stock class which it derives from, and `None` without one.
    """
    if isinstance(asked, str):
        return family_named(model_type_to_module_name(asked))
    if isinstance(asked, PreTrainedConfig):
        return family_of(asked.model_type)
    return next(iter(families_of_class(asked if isinstance(asked, type) else type(asked))), None)


def families_of_class(cls: type) -> list[Family]:
    """Return the families of the stock classes that a class derives from, the closest first."""
    return list(filter(None, map(stock_family, cls.__mro__)))


def modeling_module(family: str) -> ModuleType:
    """Import the generated modeling file of a family of `OWN`, which adds its classes to `REPLACEMENTS`."""
    return import_module(f"{__package__}.{family}.modeling_{family}")


def stock_family(cls: type) -> Family | None:
    """Return the family of a class of Transformers itself, or `None` for any other class."""
    parts = cls.__module__.split(".")
    is_stock = parts[:2] == ["transformers", "models"] and parts[-1].startswith("modeling_")
    return family_named(parts[-2]) if is_stock else None


def sizes_of(config: PreTrainedConfig, fix: str = "") -> Sizes:
    """Return the sizes of a model's text part.

    Raises:
        `ValueError`: the model is of another family than those whose sizes are known. The message ends with `fix`.
    """
    text = config.get_text_config()
    sizes = family_of(text).sizes
    if sizes is None:
        raise input_error(f"the configuration of a {titles(SIZED)} model", text.model_type, fix)
    return sizes(text)


def default_config() -> PreTrainedConfig:
    """Return Transformers' default configuration of Qwen3.5, roughly the 9B model, for plans without a model."""
    return CONFIG_MAPPING["qwen3_5_text"]()


def families_of(model: torch.nn.Module, *apart: type) -> set[Family]:
    """Return the families of all modules of a model and of their base classes.

    With `apart`, such as `Own` or `Mixers`, only those which keep documents apart in one of these ways.
    """
    bases = {base for module in model.modules() for base in type(module).__mro__}
    families = {family for base in bases if (family := stock_family(base)) is not None}
    return {family for family in families if isinstance(family.apart, apart)} if apart else families
