"""Code that the examples share: data, frameworks, the training loop, reports and the command line.

Each module reads on its own:

* ``data``: node-classification datasets from the planted generator, ``.npz`` files and the frameworks'
  loaders
* ``framework_data``: the loaders of PyG, DGL and OGB, called only on files that are already there
* ``frameworks``: which layer is the reference and which the drop-in, and how each framework holds a graph
* ``training``: one training run, and repeated runs that give every layer the same weights and seeds
* ``graph_data``, ``graph_training``: the same for many small graphs in batches
* ``ogb_data``, ``ogb_tasks``: OGB's loaders on current software, and its tasks with their Evaluators
* ``node_models``, ``sampling``: models that take whole graphs and batches, and the batches
* ``long_run``: training with checkpoints, resumed bit by bit
* ``reference_transformer``: the graph transformer layer in the frameworks' own message passing
* ``report``: the table, the JSON log and the curves
* ``cli``: the options every example takes
"""

import sys
from types import TracebackType


def _end_quietly(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Ends the program without a traceback after Ctrl-C, also while modules are imported."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _end_quietly
