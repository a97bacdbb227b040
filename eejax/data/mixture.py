"""Several data sets as the text of one run."""

from __future__ import annotations

import dataclasses

from eejax.common.errors import DataError
from eejax.data.megatron import MegatronDataset
from eejax.data.packing import PackedDataset, Split
from eejax.data.tokenizers import Tokenizer

SingleDataset = PackedDataset | MegatronDataset


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """Data sets of one tokenizer, with their shares of the training samples."""

    datasets: tuple[SingleDataset, ...]
    weights: tuple[float, ...]

    @property
    def fingerprint(self) -> str:
        """Fingerprint, as a loader over the splits computes it."""
        return "+".join(d.fingerprint for d in self.datasets)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.datasets[0].tokenizer

    def split(self, name: str) -> Split:
        """Raise an error, since a mixture has one split for each data set (`parts`)."""
        raise DataError(
            f"the {name} text is a mixture of {len(self.datasets)} data sets, and this takes one: "
            "train without data.weights, or name other text."
        )


def parts(dataset: SingleDataset | Mixture, name: str) -> tuple[Split, ...]:
    """Return the split of every data set of a mixture, or of the only one.

    Raises:
      DataError: if a data set does not have it.
    """
    datasets = dataset.datasets if isinstance(dataset, Mixture) else (dataset,)
    return tuple(d.split(name) for d in datasets)
