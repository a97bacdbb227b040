"""A server in a thread of the tests' process."""

from __future__ import annotations

from served import Scripted

from eejax.experiments.serving_runs import server_in_thread
from eejax.serving.http import HttpOptions
from eejax.serving.messages import Build
from eejax.serving.service import ServiceOptions


def serving(build: Build | None = None, options: HttpOptions | None = None):
    """(address, service) of a server of the model m in a thread of this process."""
    own = ServiceOptions(first_pause=1.0, grace=1.0)
    return server_in_thread(build or Scripted(), own, options)
