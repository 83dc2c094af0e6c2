"""Write the dashboards as Grafana reads them: `python deploy/grafana/build.py [directory]`."""

from __future__ import annotations

import sys
from pathlib import Path

from fleet import fleet
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from overview import overview
from verification import verification

DASHBOARDS = (overview, verification, fleet)


def main(directory: Path) -> None:
    """One file a dashboard, named after its uid."""
    for build in DASHBOARDS:
        board = build().build()
        text = JSONEncoder(sort_keys=True, indent=2).encode(board)
        (directory / f"{board.uid}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "dashboards")
