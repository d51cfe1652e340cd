# The public names. The package loads each of them when it is first used.

from headway.doctor.loop_observation import LoopObservation as LoopObservation
from headway.watch.loop_watch import LoopWatch as LoopWatch
from headway.watch.loop_watch import watch as watch
