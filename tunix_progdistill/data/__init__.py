"""Text in, batches out."""

from tunix_progdistill.data.config import DataConfig
from tunix_progdistill.data.pipeline import Batches
from tunix_progdistill.data.pipeline import BatchIterator
from tunix_progdistill.data.pipeline import Datasets
from tunix_progdistill.data.pipeline import check
from tunix_progdistill.data.pipeline import open_datasets
from tunix_progdistill.data.pipeline import training_texts
from tunix_progdistill.data.rows import Rows
from tunix_progdistill.data.tokenizer import Tokenizer

__all__ = [
    "BatchIterator",
    "Batches",
    "DataConfig",
    "Datasets",
    "Rows",
    "Tokenizer",
    "check",
    "open_datasets",
    "training_texts",
]
