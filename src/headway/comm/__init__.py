"""Sums gradients over the ranks of a run, and keeps track of which ranks are alive.

In: a World (`headway.core.world`), the gradients of a model, and the `comm` part of a recipe. Out: the same summed
gradients on every rank, and a new generation of ranks after one was lost.

Open `reducer` first (gradient buckets and hooks), then `communicator` (all-reduce algorithms). `links` and
`algorithm_choice` measure the network and choose the algorithm of each bucket. `coordinator` (in the launcher) and
`coordinator_client` (in each rank) track who is alive. `ddp` serves DistributedDataParallel, `hvd` Horovod scripts.
"""
