"""Axis letters of shape comments and einsums, and names of the mesh axes.

b batch              t query positions     s cache positions    d model
n query heads        k key/value heads     g query heads per key/value head
h head dim           f feed-forward        v vocabulary         l layers
e exits              p pipeline stages     m microbatches       w waiting rows
r router bottleneck
"""

from __future__ import annotations

import dataclasses

DATA, PIPE, MODEL = "data", "pipe", "model"
MESH_AXES = (DATA, PIPE, MODEL)


@dataclasses.dataclass(frozen=True)
class Axes:
    """The mesh axes of a computation inside a manual `shard_map`, each a name or None.

    The same layer code runs on one device (all None) and inside `shard_map`: with a name it
    communicates over that axis, without one it does not.

    Attributes:
      sequence: the axis over which the positions of the residual stream are split (Korthikanti et
        al. 2022), if any; it is the model axis.
    """

    data: str | None = None
    pipe: str | None = None
    model: str | None = None
    sequence: str | None = None


LOCAL = Axes()
