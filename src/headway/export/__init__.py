"""Export: a trained network with its whole pipeline as files that other programs run, checked against the original.

In: a run folder or an ensemble. Out: a folder with graphs, `pipeline.json` and `predict.py`; answers of such a folder.

Open `export_run.py` first: it lists the steps. `pipeline.py` is what is exported, `targets/` has a file for each
runtime, `gate_run.py` and `gate.py` judge, `manifest.py` is pipeline.json, `exported.py` opens a folder, `table.py`
measures it and `serve/` answers requests with it.
"""
