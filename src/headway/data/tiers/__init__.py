"""Where the bytes of a data set are kept while it is in use: where they lie, on the disk, in memory, on the device."""

from headway.data.tiers.choice import choose_tier as choose_tier
from headway.data.tiers.next_use import HostSlots as HostSlots
from headway.data.tiers.tier import MappedTier as MappedTier
from headway.data.tiers.tier import Tier as Tier
