"""Reports calls that fall back to DGL's implementation."""

from __future__ import annotations

import functools
import logging

from fastsparse_core import fallback

#: Reports once that DGL's implementation ran: ``tell(class name, reason)``.
tell = functools.partial(fallback.tell, logging.getLogger("fastsparse_dgl"), "DGL")
#: Calls DGL's implementation and reports it: ``run(class name, reason, call, *args)``.
run = functools.partial(fallback.run, tell)
