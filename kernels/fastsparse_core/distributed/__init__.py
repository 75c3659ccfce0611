"""Full-graph training in several processes, one per GPU: every process has a part of the graph's rows."""

from fastsparse_core.distributed.exchange import exchange_group
from fastsparse_core.distributed.gradients import all_reduce_gradients
from fastsparse_core.distributed.partitioned_adjacency import PartitionedAdjacency
from fastsparse_core.distributed.partitions import Partition, partition
from fastsparse_core.distributed.statistics import PartitionStatistics

__all__ = [
    "Partition",
    "PartitionStatistics",
    "PartitionedAdjacency",
    "all_reduce_gradients",
    "exchange_group",
    "partition",
]
