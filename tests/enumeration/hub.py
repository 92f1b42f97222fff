"""Models of KerasHub, with tiny configurations, and the layers, losses and metrics of Keras RS.

Both packages are optional, so they are imported when a program runs.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from tests.enumeration.training import ROWS, Program, Training, fractions, integers, numbers

WORDS, LENGTH = 10, 5

_BERT = {
    "vocabulary_size": WORDS,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 4,
    "intermediate_dim": 8,
    "max_sequence_length": LENGTH,
}
_BLOOM = {k: v for k, v in _BERT.items() if k != "max_sequence_length"}
_LLAMA = {
    "vocabulary_size": WORDS,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 8,
}
_EXPERTS = {**_LLAMA, "num_experts": 2, "top_k": 2, "sliding_window": 2}
_GEMMA = {
    **_LLAMA,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "hidden_dim": 16,
    "intermediate_dim": 32,
}
_QWEN_MOE = {
    **_LLAMA,
    "intermediate_dim": 16,
    "moe_intermediate_dim": 8,
    "num_experts": 4,
    "top_k": 2,
}
_LINEAR = {
    **_LLAMA,
    "head_dim": 8,
    "hidden_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
_LINEAR_MOE = {
    **{k: v for k, v in _LINEAR.items() if k != "intermediate_dim"},
    "moe_intermediate_dim": 8,
    "shared_expert_intermediate_size": 8,
    "num_experts": 4,
    "top_k": 2,
}

_MASKED = ("token_ids", "padding_mask")
_SEGMENTS = ("token_ids", "segment_ids", "padding_mask")
_PAIRS = (
    "encoder_token_ids",
    "encoder_padding_mask",
    "decoder_token_ids",
    "decoder_padding_mask",
)

# By name: the configuration and the names of the inputs.
TEXT: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "AlbertBackbone": (
        {**_BERT, "embedding_dim": 4, "num_groups": 1, "num_inner_repetitions": 1},
        _SEGMENTS,
    ),
    "BartBackbone": (_BERT, _PAIRS),
    "BertBackbone": (_BERT, _SEGMENTS),
    "BloomBackbone": (_BLOOM, _MASKED),
    "DebertaV3Backbone": (_BERT, _MASKED),
    "DistilBertBackbone": (_BERT, _MASKED),
    "EdRecBackbone": (
        {
            "vocab_size": WORDS,
            "num_layers_enc": 1,
            "num_layers_dec": 1,
            "num_heads": 2,
            "hidden_dim": 4,
            "intermediate_dim": 8,
        },
        _PAIRS,
    ),
    "ElectraBackbone": (
        {
            **{k: v for k, v in _BERT.items() if k != "vocabulary_size"},
            "vocab_size": WORDS,
            "embedding_dim": 4,
        },
        _SEGMENTS,
    ),
    "ESMBackbone": ({**_BLOOM, "num_heads": 1}, ("token_ids",)),
    "FNetBackbone": (
        {k: v for k, v in _BERT.items() if k != "num_heads"},
        ("token_ids", "segment_ids"),
    ),
    "FalconBackbone": (
        {
            "vocabulary_size": WORDS,
            "num_layers": 2,
            "num_attention_heads": 4,
            "hidden_dim": 8,
            "intermediate_dim": 8,
        },
        _MASKED,
    ),
    "GPT2Backbone": (_BERT, _MASKED),
    "GPTNeoXBackbone": ({**_BERT, "hidden_dim": 16}, _MASKED),
    "GemmaBackbone": (_GEMMA, _MASKED),
    "GptOssBackbone": (_EXPERTS, _MASKED),
    "Llama3Backbone": (_LLAMA, _MASKED),
    "LlamaBackbone": (_LLAMA, _MASKED),
    "MistralBackbone": ({**_LLAMA, "sliding_window": 2}, _MASKED),
    "MixtralBackbone": (_EXPERTS, _MASKED),
    "OPTBackbone": (_BERT, _MASKED),
    "Phi3Backbone": (_LLAMA, _MASKED),
    "Qwen3Backbone": ({**_LLAMA, "head_dim": 2}, _MASKED),
    "Qwen3MoeBackbone": ({**_QWEN_MOE, "head_dim": 2}, _MASKED),
    "Qwen3_5Backbone": ({**_LINEAR}, _MASKED),
    "Qwen3_5MoeBackbone": (_LINEAR_MOE, _MASKED),
    "QwenBackbone": (_LLAMA, _MASKED),
    "QwenMoeBackbone": ({**_QWEN_MOE, "shared_expert_intermediate_dim": 8}, _MASKED),
    "RobertaBackbone": (_BERT, _MASKED),
    "RoformerV2Backbone": (
        {**_BLOOM, "num_heads": 1, "head_size": 2},
        ("token_ids", "segment_ids"),
    ),
    "SmolLM3Backbone": (
        {
            **{k: v for k, v in _LLAMA.items() if "heads" not in k},
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_layer_enabled_list": [True, False],
            "layer_types": ["full_attention"] * 2,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 16,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
        _MASKED,
    ),
    "T5Backbone": (_BLOOM, _PAIRS),
    "XLMRobertaBackbone": (_BERT, _MASKED),
    "XLNetBackbone": (_BLOOM, ("token_ids", "padding_mask", "segment_ids")),
}

_RESNET = {
    "input_conv_filters": [4],
    "input_conv_kernel_sizes": [3],
    "stackwise_num_filters": [64, 64],
    "stackwise_num_blocks": [1, 1],
    "stackwise_num_strides": [1, 2],
    "block_type": "basic_block",
}
_VIT = {"patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 8}
SIZE = 16
_IMAGE = (SIZE, SIZE, 3)

IMAGES: dict[str, dict[str, Any]] = {
    "CSPNetBackbone": {
        "stem_filters": 4,
        "stem_kernel_size": 3,
        "stem_strides": 1,
        "stackwise_depth": [1, 1],
        "stackwise_strides": 2,
        "stackwise_num_filters": [4, 8],
        "block_type": "dark_block",
        "stage_type": "csp",
        "bottle_ratio": (0.5, 1.0),
        "block_ratio": (1.0, 0.5),
        "expand_ratio": (2.0, 1.0),
        "down_growth": True,
        "stem_padding": "same",
    },
    "DINOV2Backbone": {**_VIT, "intermediate_dim": 16, "num_register_tokens": 2},
    "DeiTBackbone": {**_VIT, "intermediate_dim": 16},
    "DenseNetBackbone": {
        "stackwise_num_repeats": [1, 1],
        "compression_ratio": 0.5,
        "growth_rate": 2,
    },
    "HGNetV2Backbone": {
        "initializer_range": 0.02,
        "depths": [1, 1],
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "stem_channels": [3, 4, 8],
        "hidden_act": "relu",
        "use_learnable_affine_block": False,
        "stackwise_stage_filters": [[8, 4, 8, 1, 1, 3], [8, 4, 16, 1, 1, 3]],
        "apply_downsample": [False, True],
        "use_lightweight_conv_block": [False, False],
        "out_features": ["stage2"],
    },
    "MiTBackbone": {
        "layerwise_depths": [1, 1],
        "num_layers": 2,
        "layerwise_num_heads": [1, 2],
        "layerwise_sr_ratios": [2, 1],
        "max_drop_path_rate": 0.1,
        "layerwise_patch_sizes": [7, 3],
        "layerwise_strides": [4, 2],
        "hidden_dims": [4, 8],
    },
    "ResNetBackbone": _RESNET,
    "SwinTransformerBackbone": {
        "patch_size": 4,
        "embed_dim": 4,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "window_size": 2,
    },
    "VGGBackbone": {"stackwise_num_repeats": [1, 1], "stackwise_num_filters": [4, 8]},
    "ViTBackbone": {**_VIT, "patch_size": (4, 4), "mlp_dim": 16},
    "ViTDetBackbone": {
        "hidden_size": 8,
        "num_layers": 1,
        "intermediate_dim": 16,
        "num_heads": 2,
        "global_attention_layer_indices": [0],
        "patch_size": 4,
        "num_output_channels": 4,
        "window_size": 2,
    },
    "XceptionBackbone": {
        "stackwise_conv_filters": [[4, 4], [4, 4]],
        "stackwise_pooling": [True, False],
    },
}


# With float32, rounding alone changes their results by more than 1e-5.
_IN_DOUBLE = ("Bloom", "EdRec", "FNet")
# Its layers do not compute with float64, so small updates keep the effect of rounding below 1e-5.
_SLOWLY = ("Mixtral",)


def _hub() -> Any:
    import keras_hub

    return keras_hub


def _rs() -> Any:
    import keras_rs

    return keras_rs


def backbone(name: str) -> keras.Model:
    create = getattr(_hub().models, name)
    if name in TEXT:
        return create(**TEXT[name][0])
    return create(**IMAGES[name], image_shape=_IMAGE)


def _tokens(names: Iterable[str]) -> dict[str, np.ndarray]:
    lengths = integers(LENGTH, ROWS, low=2, seed=4)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype("int32")
    values = {
        "token_ids": lambda: integers(WORDS, ROWS, LENGTH, low=1) * mask,
        "padding_mask": lambda: mask,
        "segment_ids": lambda: integers(2, ROWS, LENGTH, seed=1),
    }
    return {
        name: values[name.removeprefix("encoder_").removeprefix("decoder_")]() for name in names
    }


def _x(name: str) -> Any:
    return _tokens(TEXT[name][1]) if name in TEXT else numbers(ROWS, *_IMAGE)


def _sgd(rate: float = 0.02) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate)


def _of_backbone(name: str) -> Program:
    def model() -> keras.Model:
        built = backbone(name)
        means = [
            ops.mean(x, axis=tuple(range(1, len(x.shape) - 1))) if len(x.shape) > 2 else x
            for x in keras.tree.flatten(built.output)
        ]
        joined = ops.concatenate(means, axis=-1) if len(means) > 1 else means[0]
        return keras.Model(built.input, keras.layers.Dense(2)(joined))

    return Training(
        model,
        lambda: (_x(name), numbers(ROWS, 2, seed=9)),
        lambda: {
            "optimizer": _sgd(0.002 if name.startswith(_SLOWLY) else 0.02),
            "loss": "mse",
        },
        double=name.startswith(_IN_DOUBLE),
    )


def _crossentropy() -> dict[str, Any]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"optimizer": _sgd(), "loss": loss, "weighted_metrics": ["accuracy"]}


def _task(name: str, of: str, **options: Any) -> Callable[[], keras.Model]:
    return lambda: getattr(_hub().models, name)(backbone(of), preprocessor=None, **options)


def _of_task(name: str) -> Program:
    """Makes the program of a task, whose name is that of its backbone and one of `_KINDS`."""
    kind = next(k for k in _KINDS if name.endswith(k))
    of = _BACKBONES.get(name, name.removesuffix(kind) + "Backbone")
    if kind in ("CausalLM", "Seq2SeqLM"):
        model = _task(name, of)

        def data() -> tuple[Any, ...]:
            return _x(of), integers(WORDS, ROWS, LENGTH, seed=3), _row_masks()

    elif kind in ("MaskedLM", "MaskedPLM"):
        model = _task(name, of)

        def data() -> tuple[Any, ...]:
            x = {**_x(of), "mask_positions": integers(LENGTH, ROWS, 2, seed=2)}
            return x, integers(WORDS, ROWS, 2, seed=3), _row_masks()[:, :2]

    else:
        model = _task(name, of, num_classes=3)

        def data() -> tuple[Any, ...]:
            return _x(of), integers(3, ROWS, seed=3)

    return Training(model, data, _crossentropy, double=name.startswith(_IN_DOUBLE))


def _row_masks() -> np.ndarray:
    return fractions(ROWS, LENGTH, seed=6)


_KINDS = (
    "TextClassifier",
    "ProteinClassifier",
    "ImageClassifier",
    "MaskedLM",
    "MaskedPLM",
    "CausalLM",
    "Seq2SeqLM",
)
_BACKBONES = {
    "ESMProteinClassifier": "ESMBackbone",
    "ESMMaskedPLM": "ESMBackbone",
    "ESM2MaskedPLM": "ESMBackbone",
}

TASKS = (
    *(f"{n}TextClassifier" for n in ("Albert", "Bert", "DebertaV3", "DistilBert", "FNet")),
    *(f"{n}TextClassifier" for n in ("Roberta", "RoformerV2", "XLMRoberta")),
    *(f"{n}MaskedLM" for n in ("Albert", "Bert", "DebertaV3", "DistilBert", "FNet")),
    *(f"{n}MaskedLM" for n in ("Roberta", "RoformerV2", "XLMRoberta")),
    *(f"{n}CausalLM" for n in ("Bloom", "Falcon", "GPT2", "GPTNeoX", "Gemma", "GptOss")),
    *(f"{n}CausalLM" for n in ("Llama", "Llama3", "Mistral", "Mixtral", "OPT", "Phi3")),
    *(f"{n}CausalLM" for n in ("Qwen", "Qwen3", "Qwen3Moe", "Qwen3_5", "Qwen3_5Moe")),
    *(f"{n}CausalLM" for n in ("QwenMoe", "SmolLM3")),
    *(f"{n}Seq2SeqLM" for n in ("Bart", "EdRec", "T5")),
    *(f"{n}ImageClassifier" for n in ("CSPNet", "DeiT", "DenseNet", "HGNetV2", "MiT")),
    *(f"{n}ImageClassifier" for n in ("ResNet", "SwinTransformer", "VGG", "ViT", "Xception")),
    "ESMProteinClassifier",
    "ESMMaskedPLM",
)


class Retrieving(keras.Model):
    """Two towers whose negatives are the other rows of the batch."""

    def __init__(self, correct: Callable[..., Any]) -> None:
        super().__init__()
        self.queries = keras.layers.Embedding(8, 4)
        self.candidates = keras.layers.Embedding(6, 4)
        self.correct = correct

    def call(self, x):
        return self.queries(x["query"]), self.candidates(x["candidate"])

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        queries, candidates = y_pred
        logits = ops.matmul(queries, ops.transpose(candidates))
        labels = ops.eye(ops.shape(logits)[0])
        logits, labels = self.correct(logits, labels, x)
        return keras.losses.CategoricalCrossentropy(from_logits=True)(labels, logits)


def _retrieval(correct: Callable[[], Callable[..., Any]]) -> Program:
    def data() -> tuple[Any, ...]:
        x = {
            "query": integers(8, ROWS),
            "candidate": integers(6, ROWS, seed=1),
            "probability": fractions(ROWS),
        }
        return (x,)

    return Training(
        lambda: Retrieving(correct()), data, lambda: {"optimizer": _sgd(0.5)}, steps=("evaluate",)
    )


def _no_accidents() -> Callable[..., Any]:
    layer = _rs().layers.RemoveAccidentalHits()
    return lambda logits, labels, x: (layer(logits, labels, x["candidate"]), labels)


def _hard_negatives() -> Callable[..., Any]:
    layer = _rs().layers.HardNegativeMining(3)
    return lambda logits, labels, x: layer(logits, labels)


def _corrected() -> Callable[..., Any]:
    layer = _rs().layers.SamplingProbabilityCorrection()
    return lambda logits, labels, x: (layer(logits, x["probability"]), labels)


def _brute_force() -> keras.Model:
    layer = _rs().layers.BruteForceRetrieval(k=2)
    layer.update_candidates(ops.convert_to_tensor(numbers(6, 4, seed=7)))
    inputs = keras.Input((3,))
    scores, _ = layer(keras.layers.Dense(4)(inputs))
    return keras.Model(inputs, scores)


def _layer(call: Callable[..., Any], *shapes: tuple[int, ...], high: int = 0) -> Program:
    def model() -> keras.Model:
        kind = "int32" if high else "float32"
        inputs = [keras.Input(shape, dtype=kind) for shape in shapes]
        given = (
            inputs
            if high
            else [keras.layers.Dense(s[-1])(x) for s, x in zip(shapes, inputs, strict=True)]
        )
        values = keras.layers.Flatten()(call()(*given))
        return keras.Model(inputs, keras.layers.Dense(2)(values))

    def data() -> tuple[Any, ...]:
        draw = (lambda *s, seed: integers(high, *s, seed=seed)) if high else numbers
        return [draw(ROWS, *s, seed=i) for i, s in enumerate(shapes)], numbers(ROWS, 2, seed=9)

    return Training(model, data, lambda: {"optimizer": _sgd(0.05), "loss": "mse"})


def _distributed() -> Any:
    r = _rs().layers
    table = r.TableConfig(
        "table",
        vocabulary_size=8,
        embedding_dim=3,
        optimizer="sgd",
        combiner="sum",
        placement="default_device",
    )
    feature = r.FeatureConfig("feature", table, input_shape=(None, 4), output_shape=(None, 3))
    layer = r.DistributedEmbedding({"feature": feature})
    return lambda x: layer({"feature": x})["feature"]


def _ranking(loss: str | None, metric: str | None) -> Program:
    def model() -> keras.Model:
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(5)(inputs))

    def compiled() -> dict[str, Any]:
        own = getattr(_rs().losses, loss)() if loss else "mse"
        metrics = [getattr(_rs().metrics, metric)(k=3, shuffle_ties=False)] if metric else []
        return {"optimizer": _sgd(0.05), "loss": own, "metrics": metrics}

    high = 2 if metric else 4
    return Training(
        model,
        lambda: (numbers(ROWS, 4), integers(high, ROWS, 5, seed=3).astype("float32")),
        compiled,
        steps=("evaluate",),
    )


def _perplexity() -> Program:
    def model() -> keras.Model:
        inputs = keras.Input((LENGTH, 3))
        return keras.Model(inputs, keras.layers.Dense(WORDS)(inputs))

    def compiled() -> dict[str, Any]:
        measured = _hub().metrics.Perplexity(from_logits=True, mask_token_id=0)
        return {**_crossentropy(), "weighted_metrics": [measured]}

    def data() -> tuple[Any, ...]:
        return numbers(ROWS, LENGTH, 3), integers(WORDS, ROWS, LENGTH, seed=3), _row_masks()

    return Training(model, data, compiled, steps=("evaluate",))


LAYERS: dict[str, Program] = {
    "AlibiBias": _layer(lambda: _hub().layers.AlibiBias(), (2, 3, 3)),
    "CachedMultiHeadAttention": _layer(
        lambda: lambda x: _hub().layers.CachedMultiHeadAttention(2, 2)(x, x), (3, 4)
    ),
    "FNetEncoder": _layer(lambda: _hub().layers.FNetEncoder(8), (3, 4)),
    "PositionEmbedding": _layer(lambda: _hub().layers.PositionEmbedding(3), (3, 4)),
    "RMSNormalization": _layer(lambda: _hub().layers.RMSNormalization(4), (3, 4)),
    "ReversibleEmbedding": _layer(lambda: _hub().layers.ReversibleEmbedding(8, 3), (4,), high=8),
    "RotaryEmbedding": _layer(lambda: _hub().layers.RotaryEmbedding(), (3, 4)),
    "SinePositionEncoding": _layer(lambda: _hub().layers.SinePositionEncoding(), (3, 4)),
    "TokenAndPositionEmbedding": _layer(
        lambda: _hub().layers.TokenAndPositionEmbedding(8, 4, 3), (4,), high=8
    ),
    "TransformerDecoder": _layer(lambda: _hub().layers.TransformerDecoder(8, 2), (3, 4)),
    "TransformerEncoder": _layer(
        lambda: _hub().layers.TransformerEncoder(8, 2, dropout=0.2), (3, 4)
    ),
    "BruteForceRetrieval": Training(
        _brute_force,
        lambda: (numbers(ROWS, 3), numbers(ROWS, 2, seed=9)),
        lambda: {"optimizer": _sgd(), "loss": "mse"},
    ),
    "DistributedEmbedding": _layer(_distributed, (4,), high=8),
    "DotInteraction": _layer(
        lambda: lambda *x: _rs().layers.DotInteraction()(list(x)), (3,), (3,), (3,)
    ),
    "DotInteraction/all": _layer(
        lambda: lambda *x: _rs().layers.DotInteraction(True, True)(list(x)), (3,), (3,)
    ),
    "EmbedReduce": _layer(lambda: _rs().layers.EmbedReduce(8, 3), (4,), high=8),
    "FeatureCross": _layer(lambda: lambda x, y: _rs().layers.FeatureCross()(x, y), (4,), (4,)),
    "FeatureCross/low rank": _layer(
        lambda: lambda x: _rs().layers.FeatureCross(projection_dim=2, diag_scale=0.1)(x), (4,)
    ),
    "HardNegativeMining": _retrieval(_hard_negatives),
    "RemoveAccidentalHits": _retrieval(_no_accidents),
    "SamplingProbabilityCorrection": _retrieval(_corrected),
}
LOSSES = (
    "ListMLELoss",
    "PairwiseHingeLoss",
    "PairwiseLogisticLoss",
    "PairwiseMeanSquaredError",
    "PairwiseSoftZeroOneLoss",
)
METRICS = (
    "DCG",
    "MeanAveragePrecision",
    "MeanReciprocalRank",
    "NDCG",
    "PrecisionAtK",
    "RecallAtK",
)

PROGRAMS: dict[str, Program] = {
    **{name: _of_backbone(name) for name in (*TEXT, *IMAGES)},
    **{name: _of_task(name) for name in TASKS},
    **LAYERS,
    **{name: _ranking(name, None) for name in LOSSES},
    **{name: _ranking(None, name) for name in METRICS},
    "Perplexity": _perplexity(),
}

DEFAULT: list[str] = []

# The reasons why public classes have no program, by patterns of their names.
_NOT_YET = "has no small configuration here yet"
_OTHER_MODELS = f"joins models of several kinds; {_NOT_YET}"
WITHOUT_A_PROGRAM: dict[str, str] = {
    **dict.fromkeys(("Backbone", "Task", "Retrieval", "Classifier"), "is a base class"),
    **dict.fromkeys(("CausalLM", "MaskedLM", "Seq2SeqLM", "ImageToImage"), "is a base class"),
    **dict.fromkeys(("ImageClassifier", "ImageSegmenter", "Inpaint"), "is a base class"),
    **dict.fromkeys(("TextClassifier", "TextEmbedder", "TextToImage"), "is a base class"),
    **dict.fromkeys(("DepthEstimator", "ObjectDetector", "ImageObjectDetector"), "is a base class"),
    **dict.fromkeys(("FeatureConfig", "TableConfig"), "configures DistributedEmbedding"),
    "*Converter": "prepares data before a model takes them",
    "*Packer": "prepares data before a model takes them",
    "MaskedLMMaskGenerator": "prepares data before a model takes them",
    "RandomDeletion": "prepares data before a model takes them",
    "RandomSwap": "prepares data before a model takes them",
    "MaskedLMHead": "is a part of each MaskedLM",
    "Bleu": "compares texts, which are not trained",
    "EditDistance": "compares texts, which are not trained",
    "Rouge*": "compares texts, which are not trained",
    **dict.fromkeys(
        ("AnchorGenerator", "BoxMatcher", "NonMaxSuppression"), "is a part of detectors"
    ),
    **dict.fromkeys(("SAM*", "BLIP2*", "CLIP*", "MetaCLIP2*", "SigLIP*"), _OTHER_MODELS),
    **dict.fromkeys(("Flux*", "StableDiffusion3*", "Whisper*", "Moonshine*"), _OTHER_MODELS),
    **dict.fromkeys(("Gemma3*", "Gemma4*", "PaliGemma*", "T5Gemma*", "PARSeq*"), _OTHER_MODELS),
    **dict.fromkeys(("VideoPrism*", "DINOV3*", "MobileNet*", "EfficientNet*"), _NOT_YET),
    **dict.fromkeys(("BASNet*", "DeepLabV3*", "SegFormer*", "DFine*", "RetinaNet*"), _NOT_YET),
    **dict.fromkeys(("DepthAnything*", "FeaturePyramid*", "RWKV7*", "*TextEmbedder"), _NOT_YET),
}


def missing() -> set[str]:
    """The public classes without a program."""
    return set(_public()) - {name.partition("/")[0] for name in PROGRAMS}


def _public() -> Iterable[str]:
    hub, rs = _hub(), _rs()
    models = {
        name: value
        for name, value in vars(hub.models).items()
        if inspect.isclass(value) and issubclass(value, (hub.models.Backbone, hub.models.Task))
    }
    groups = (models, *map(vars, (hub.layers, hub.metrics, rs.layers, rs.losses, rs.metrics)))
    for group in groups:
        for name, value in group.items():
            # A class with another name is an alias.
            if inspect.isclass(value) and value.__name__ == name:
                yield name


def reason(name: str) -> str | None:
    """Why a public class has no program; None if there is no reason."""
    return next((why for p, why in WITHOUT_A_PROGRAM.items() if fnmatch.fnmatchcase(name, p)), None)
