"""Tiers: where records are kept while a data set is in use: on the device, in memory, on the disk, or nowhere.

In: a `Dataset` and `data.cache` of the recipe. Out: a `Tier`, from which a Loader reads records.

Open `choice.py` first: it chooses the tier. `tier.py` has the interface, `memory.py`, `device.py` and `disk.py` the
kinds. Behind `disk.py`, `prefetch.py` fetches remote records ahead of need and `store.py` keeps them on the disk.
"""

from headway.data.tiers.choice import choose_tier as choose_tier
from headway.data.tiers.next_use import HostSlots as HostSlots
from headway.data.tiers.tier import MappedTier as MappedTier
from headway.data.tiers.tier import Tier as Tier
