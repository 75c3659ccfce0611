"""The layers that `enable()` turns into drop-ins at their first call."""

from fastsparse_core.layer_swap import FirstCalls

FIRST_CALLS = FirstCalls("DGL", "fastsparse_dgl.layer_swap")
