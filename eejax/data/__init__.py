"""Text, tokenizers, packed token files, and a loader whose position is part of a checkpoint."""

from eejax.data.hub import HubDataset
from eejax.data.loader import IGNORE, Batch, Loader, batches, even_windows
from eejax.data.packing import PackedDataset, Split, open_packed, pack
from eejax.data.prefetch import Prefetch, windows
from eejax.data.sentencepiece import SentencePieceTokenizer
from eejax.data.sources import (
    PYTHON_STDLIB,
    Chain,
    Document,
    PythonStdlib,
    Source,
    TextFiles,
    source,
)
from eejax.data.tokenizers import (
    BYTES,
    ByteTokenizer,
    JsonTokenizer,
    TextStream,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    save_tokenizer,
    train_bpe,
)

__all__ = [
    "BYTES",
    "IGNORE",
    "PYTHON_STDLIB",
    "Batch",
    "ByteTokenizer",
    "Chain",
    "Document",
    "HubDataset",
    "JsonTokenizer",
    "Loader",
    "PackedDataset",
    "Prefetch",
    "PythonStdlib",
    "SentencePieceTokenizer",
    "Source",
    "Split",
    "TextFiles",
    "TextStream",
    "Tokenizer",
    "batches",
    "check_vocabulary",
    "even_windows",
    "load_tokenizer",
    "open_packed",
    "pack",
    "save_tokenizer",
    "source",
    "train_bpe",
    "windows",
]
