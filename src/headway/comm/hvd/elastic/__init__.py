"""Elastic training, which survives changes of the workers: `@hvd.elastic.run def train(state): ...`."""

from headway.comm.hvd.elastic.loop import run as run
from headway.comm.hvd.elastic.sampler import ElasticSampler as ElasticSampler
from headway.comm.hvd.elastic.state import ObjectState as ObjectState
from headway.comm.hvd.elastic.state import State as State
from headway.comm.hvd.elastic.state import TorchState as TorchState
