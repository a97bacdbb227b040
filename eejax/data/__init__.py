"""Text, tokenizers, packed token files, and a loader whose position is part of a checkpoint."""

from eejax.data.hub import HubDataset
from eejax.data.loader import IGNORE, Batch, Loader, batches, even_windows
from eejax.data.megatron import MegatronDataset, open_megatron
from eejax.data.mixture import Mixture, parts
from eejax.data.packing import (
    PackedDataset,
    PackProgress,
    Split,
    find_packed,
    open_packed,
    pack,
)
from eejax.data.prefetch import Prefetch, windows
from eejax.data.sentencepiece import SentencePieceTokenizer
from eejax.data.sources import (
    PYTHON_STDLIB,
    Chain,
    Document,
    Documents,
    PythonStdlib,
    Source,
    TextFiles,
    source,
)
from eejax.data.streams import TextStream, text_behind
from eejax.data.tokenizer_files import load_tokenizer
from eejax.data.tokenizers import (
    BYTES,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    check_vocabulary,
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
    "Documents",
    "HubDataset",
    "JsonTokenizer",
    "Loader",
    "MegatronDataset",
    "Mixture",
    "PackProgress",
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
    "find_packed",
    "load_tokenizer",
    "open_megatron",
    "open_packed",
    "pack",
    "parts",
    "save_tokenizer",
    "source",
    "text_behind",
    "train_bpe",
    "windows",
]
