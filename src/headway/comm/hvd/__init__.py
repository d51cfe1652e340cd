"""Horovod's names for PyTorch: `import headway.comm.hvd as hvd` runs a script that was written for `horovod.torch`.

In: named collectives from any thread of each rank. Out: their results, executed when all ranks have submitted them,
in any order. docs/horovod.md lists the differences from Horovod.

Open `ops` first (the collectives with handles), then `engine` (one rank's side) and `negotiator` (rank 0's thread that
decides what is executed when). `collectives` moves the data, over the core's groups and its Communicator.
`differentiable` has the collectives with gradients, `optimizer` DistributedOptimizer, `elastic` changes of the workers.
"""

from headway.comm.hvd import elastic as elastic
from headway.comm.hvd.batch_norm import SyncBatchNorm as SyncBatchNorm
from headway.comm.hvd.compression import Compression as Compression
from headway.comm.hvd.context import ccl_built as ccl_built
from headway.comm.hvd.context import cross_rank as cross_rank
from headway.comm.hvd.context import cross_size as cross_size
from headway.comm.hvd.context import cuda_built as cuda_built
from headway.comm.hvd.context import ddl_built as ddl_built
from headway.comm.hvd.context import gloo_built as gloo_built
from headway.comm.hvd.context import gloo_enabled as gloo_enabled
from headway.comm.hvd.context import is_homogeneous as is_homogeneous
from headway.comm.hvd.context import is_initialized as is_initialized
from headway.comm.hvd.context import local_rank as local_rank
from headway.comm.hvd.context import local_size as local_size
from headway.comm.hvd.context import mpi_built as mpi_built
from headway.comm.hvd.context import mpi_enabled as mpi_enabled
from headway.comm.hvd.context import mpi_threads_supported as mpi_threads_supported
from headway.comm.hvd.context import nccl_built as nccl_built
from headway.comm.hvd.context import rank as rank
from headway.comm.hvd.context import rocm_built as rocm_built
from headway.comm.hvd.context import size as size
from headway.comm.hvd.context import start_timeline as start_timeline
from headway.comm.hvd.context import stop_timeline as stop_timeline
from headway.comm.hvd.differentiable import allgather as allgather
from headway.comm.hvd.differentiable import allreduce as allreduce
from headway.comm.hvd.differentiable import alltoall as alltoall
from headway.comm.hvd.differentiable import broadcast as broadcast
from headway.comm.hvd.differentiable import grouped_allgather as grouped_allgather
from headway.comm.hvd.differentiable import grouped_allreduce as grouped_allreduce
from headway.comm.hvd.differentiable import grouped_reducescatter as grouped_reducescatter
from headway.comm.hvd.differentiable import reducescatter as reducescatter
from headway.comm.hvd.errors import HorovodInternalError as HorovodInternalError
from headway.comm.hvd.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from headway.comm.hvd.lifecycle import init as init
from headway.comm.hvd.lifecycle import shutdown as shutdown
from headway.comm.hvd.objects import allgather_object as allgather_object
from headway.comm.hvd.objects import broadcast_object as broadcast_object
from headway.comm.hvd.ops import allgather_async as allgather_async
from headway.comm.hvd.ops import allreduce_ as allreduce_
from headway.comm.hvd.ops import allreduce_async as allreduce_async
from headway.comm.hvd.ops import allreduce_async_ as allreduce_async_
from headway.comm.hvd.ops import alltoall_async as alltoall_async
from headway.comm.hvd.ops import barrier as barrier
from headway.comm.hvd.ops import broadcast_ as broadcast_
from headway.comm.hvd.ops import broadcast_async as broadcast_async
from headway.comm.hvd.ops import broadcast_async_ as broadcast_async_
from headway.comm.hvd.ops import grouped_allgather_async as grouped_allgather_async
from headway.comm.hvd.ops import grouped_allreduce_ as grouped_allreduce_
from headway.comm.hvd.ops import grouped_allreduce_async as grouped_allreduce_async
from headway.comm.hvd.ops import grouped_allreduce_async_ as grouped_allreduce_async_
from headway.comm.hvd.ops import grouped_reducescatter_async as grouped_reducescatter_async
from headway.comm.hvd.ops import join as join
from headway.comm.hvd.ops import poll as poll
from headway.comm.hvd.ops import reducescatter_async as reducescatter_async
from headway.comm.hvd.ops import sparse_allreduce_async as sparse_allreduce_async
from headway.comm.hvd.ops import synchronize as synchronize
from headway.comm.hvd.optimizer import DistributedOptimizer as DistributedOptimizer
from headway.comm.hvd.parameters import broadcast_optimizer_state as broadcast_optimizer_state
from headway.comm.hvd.parameters import broadcast_parameters as broadcast_parameters
from headway.comm.hvd.process_sets import ProcessSet as ProcessSet
from headway.comm.hvd.process_sets import add_process_set as add_process_set
from headway.comm.hvd.process_sets import global_process_set as global_process_set
from headway.comm.hvd.process_sets import remove_process_set as remove_process_set
from headway.comm.hvd.reduce_op import Adasum as Adasum
from headway.comm.hvd.reduce_op import Average as Average
from headway.comm.hvd.reduce_op import Max as Max
from headway.comm.hvd.reduce_op import Min as Min
from headway.comm.hvd.reduce_op import Product as Product
from headway.comm.hvd.reduce_op import Sum as Sum
