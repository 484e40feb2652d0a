"""Support for packed rows by model family: how each family keeps documents apart, or why it cannot.

A family is a modeling module, `transformers.models.<family>.modeling_<family>`. Qwen3-Next, Qwen3.5 and Qwen3.5-MoE
have dedicated classes (`FAMILIES`). Every other family is in one of four tables:

* `MIXERS`: token mixers that ignore document boundaries run on each document separately.
* `UNPACKED`: the whole model runs on the documents as a right-padded batch.
* `ISOLATED`: the stock model keeps documents apart when position ids restart. It needs no change.
* `REFUSED`: the model cannot compute packed rows correctly.
"""

from dataclasses import dataclass

import torch


# Suffixes of the names of classes whose loss is over tokens.
LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
# Families with dedicated classes: for each configuration, the class that each Auto class builds.
FAMILIES = {
    "qwen3_next": {
        "Qwen3NextConfig": {
            "AutoModel": "Qwen3NextModel",
            "AutoModelForCausalLM": "Qwen3NextForCausalLM",
            "AutoModelForSequenceClassification": "Qwen3NextForSequenceClassification",
            "AutoModelForTokenClassification": "Qwen3NextForTokenClassification",
            "AutoModelForQuestionAnswering": "Qwen3NextForQuestionAnswering",
        },
    },
    "qwen3_5": {
        "Qwen3_5TextConfig": {
            "AutoModel": "Qwen3_5TextModel",
            "AutoModelForCausalLM": "Qwen3_5ForCausalLM",
            "AutoModelForSequenceClassification": "Qwen3_5TextForSequenceClassification",
            "AutoModelForTokenClassification": "Qwen3_5ForTokenClassification",
        },
        "Qwen3_5Config": {
            "AutoModel": "Qwen3_5Model",
            "AutoModelForCausalLM": "Qwen3_5ForCausalLM",
            "AutoModelForImageTextToText": "Qwen3_5ForConditionalGeneration",
            "AutoModelForSequenceClassification": "Qwen3_5ForSequenceClassification",
            "AutoModelForTokenClassification": "Qwen3_5ForTokenClassification",
        },
    },
    "qwen3_5_moe": {
        "Qwen3_5MoeTextConfig": {
            "AutoModel": "Qwen3_5MoeTextModel",
            "AutoModelForCausalLM": "Qwen3_5MoeForCausalLM",
        },
        "Qwen3_5MoeConfig": {
            "AutoModel": "Qwen3_5MoeModel",
            "AutoModelForCausalLM": "Qwen3_5MoeForCausalLM",
            "AutoModelForImageTextToText": "Qwen3_5MoeForConditionalGeneration",
        },
    },
}


@dataclass(frozen=True)
class Mixer:
    """How a token mixer runs on a packed row: on each document separately, or on the whole row if its kernels allow.

    Args:
        outputs (`tuple[int]`, *optional*, defaults to `(0,)`):
            If the module returns a tuple, the indices of the elements with one entry per token. The other elements
            become `None`.
        masked (`bool`, *optional*, defaults to `False`):
            Whether the module is attention and needs a causal mask for the documents it runs on.
        keywords (`tuple[str]`, *optional*):
            The keyword arguments (from `SequenceBoundaries.layer_kwargs`) that pass the boundaries to its kernels.
        kernels (`tuple[str]`, *optional*):
            The functions of the modeling module that must be kernels, not torch references, to run on the whole row.
    """

    outputs: tuple[int, ...] = (0,)
    masked: bool = False
    keywords: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()


_PLAIN = Mixer()
_ATTENTION = Mixer(masked=True)
_CONV = Mixer(keywords=("seq_idx",), kernels=("causal_conv1d_fn",))
_MAMBA2 = Mixer(
    keywords=("seq_idx",), kernels=("causal_conv1d_fn", "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined")
)
_GATED_DELTA = Mixer(
    keywords=("cu_seq_lens_q", "seq_idx"), kernels=("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
)
_KIMI_DELTA = Mixer(keywords=("cu_seqlens", "seq_idx"), kernels=("causal_conv1d_fn", "chunk_kimi_delta_attention"))

# Mixer classes by family.
MIXERS: dict[str, dict[str, Mixer]] = {
    "bailing_hybrid": {"BailingHybridDeltaAttention": _KIMI_DELTA},
    "bamba": {"BambaMixer": _MAMBA2},
    "falcon_h1": {"FalconH1Mixer": _MAMBA2},
    "falcon_mamba": {"FalconMambaMixer": _PLAIN},
    # No module needs replacing. It is enough to disable the cache of the text model, which mixes documents with one.
    "fuyu": {},
    "got_ocr2": {},
    # Compressed keys pool groups of tokens that are counted from the start of the row.
    "deepseek_v4": {"DeepseekV4Attention": _ATTENTION},
    # The attention's indexer pools and selects tokens across the whole row.
    "glm5_next": {"Glm5NextTextLinearAttention": _KIMI_DELTA, "Glm5NextTextAttention": Mixer(outputs=(0, 2))},
    # Its attention receives no position ids, so it cannot detect documents.
    "granitemoehybrid": {"GraniteMoeHybridMambaLayer": _MAMBA2, "GraniteMoeHybridAttention": _ATTENTION},
    # Its attention scales queries by their index in the row.
    "inkling": {"InklingShortConvolution": _CONV, "InklingAttention": _ATTENTION},
    "inkling2": {"Inkling2ShortConvolution": _CONV, "Inkling2DynamicShortConvolution": _PLAIN},
    "inkling2_loop": {"Inkling2LoopShortConvolution": _CONV, "Inkling2LoopDynamicShortConvolution": _PLAIN},
    "jamba": {"JambaMambaMixer": _PLAIN},
    "kimi_linear": {"KimiLinearDeltaAttention": _KIMI_DELTA},
    "lara_mini": {"LaraMiniGatedDeltaNet": _GATED_DELTA},
    "lfm2": {"Lfm2ShortConv": _CONV},
    "lfm2_moe": {"Lfm2MoeShortConv": _CONV},
    "lfm3": {"Lfm3ShortConv": _PLAIN},
    "mamba": {"MambaMixer": _PLAIN},
    "mamba2": {"Mamba2Mixer": _MAMBA2},
    "minimax": {"MiniMaxLightningAttention": _PLAIN},
    "nemotron_h": {"NemotronHMamba2Mixer": _MAMBA2},
    "olmo_hybrid": {"OlmoHybridGatedDeltaNet": _GATED_DELTA},
    "qwen4_exp": {"Qwen4ExpTextGatedDeltaNet": _GATED_DELTA, "Qwen4ExpTextPLELayer": _PLAIN},
    "recurrent_gemma": {"RecurrentGemmaRecurrentBlock": _PLAIN},
    "rwkv": {"RwkvSelfAttention": _PLAIN, "RwkvFeedForward": _PLAIN},
    "xlstm": {"xLSTMLayer": _PLAIN},
    "zamba": {"ZambaMambaMixer": _PLAIN},
    "zamba2": {"Zamba2MambaMixer": _MAMBA2},
    "zaya": {"ZayaCCAProjection": Mixer(outputs=(0, 1, 2))},
}


@dataclass(frozen=True)
class Unpacked:
    """A family whose base model runs on each document separately.

    Args:
        base (`str`):
            The stock class of the base model.
        cause (`str`):
            The reason why the stock class mixes documents.
        shifts_labels (`bool`, *optional*, defaults to `True`):
            Whether the loss compares a token's logits with the next label. Otherwise no target crosses a boundary.
    """

    base: str
    cause: str
    shifts_labels: bool = True


_MASKS = "its attention mask ignores position ids"
_DECODER = "the decoder creates masks and positions without position ids"

UNPACKED: dict[str, Unpacked] = {
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
ISOLATED = frozenset(
    """
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
)

_BOTH_WAYS = "its attention is bidirectional unless it is configured as a decoder, which was never audited"

# Reasons by family.
REFUSED: dict[str, str] = {
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


def family_of(cls: type) -> str | None:
    """Return the family of a Transformers class, which is the name of its modeling module."""
    parts = cls.__module__.split(".")
    if parts[:2] == ["transformers", "models"] and parts[-1].startswith("modeling_"):
        return parts[-2]
    return None


def families_of(model: torch.nn.Module) -> set[str]:
    """Return the families of all modules of a model and of their base classes."""
    bases = {base for module in model.modules() for base in type(module).__mro__}
    return {family for base in bases if (family := family_of(base)) is not None}
