"""Workers: the user's own code, run on samples by processes or threads.

In: a data set of the user's own, or a function on one image, and the positions of a step. Out: the same batches
whatever the number of workers.

Open `sample_source.py` first: it serves data sets. `worker_pool.py` runs tasks in processes, in their order;
`sample_seeds.py` seeds the random generators of each sample.
"""
