"""SentencePiece's protocol buffers: the form of a `tokenizer.model`."""

from typing import Any

from sentencepiece import sentencepiece_model_pb2

# Made when the module is imported, so that no type checker knows them.
_GENERATED: Any = sentencepiece_model_pb2
ModelProto: Any = _GENERATED.ModelProto
TrainerSpec: Any = _GENERATED.TrainerSpec
# The types of pieces: NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE, UNUSED.
Types: Any = ModelProto.SentencePiece
