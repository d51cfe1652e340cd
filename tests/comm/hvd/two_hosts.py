"""What four ranks on two hosts find out about each other; rank 0 prints it."""

import torch

import headway.comm.hvd as hvd

hvd.init()
n, me = hvd.size(), hvd.rank()
torch.manual_seed(me)
mine = torch.randn(300_000, dtype=torch.float64)
total = hvd.allreduce(mine, op=hvd.Sum)
wanted = sum(torch.stack(torch.unbind(hvd.allgather(mine[None]))))
torch.testing.assert_close(total, wanted)
small = hvd.allreduce(torch.ones(3), name="small")
assert small.tolist() == [1.0] * 3
assert all(torch.equal(total, row) for row in hvd.allgather(total[None]))  # the same bits on all
places = hvd.allgather_object((me, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()))
if me == 0:
    print(places)
