"""A rank of the doctor's that takes as little time as it can: _brief_rank.py ASKED, as `rank_examination` runs it."""

from __future__ import annotations

import json
import sys

from headway.doctor.budget import Budget
from headway.doctor.rank_examination import main

if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Budget(each=0.1, passes=0.1, side=0.05, whole=0.1, tries=0.0, wall=1.0))
