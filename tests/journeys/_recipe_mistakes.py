"""Mistakes in a recipe: its keys, its values, its file and the paths in it."""

from __future__ import annotations

from tests.journeys._mistake import Mistake, edit_recipe, set_key

RECIPE_MISTAKES = [
    # Keys
    set_key("size at the top", "size=96", "no key 'size'", "Did you mean 'data.size'?"),
    set_key("PyTorch's name of the rate", "lr=0.1", "no key 'lr'", "Did you mean 'optimizer.lr'?"),
    set_key("Keras' name of the rate", "learning_rate=0.1", "no key 'learning_rate'", "Did you mean 'optimizer.lr'?"),
    set_key("a key at the wrong place", "weight_decay=1e-4", "no key 'weight_decay'", "'optimizer.weight_decay'?"),
    set_key(
        "a typo in a key", "optimizer.wieght_decay=1", "no key 'optimizer.wieght_decay'", "'optimizer.weight_decay'?"
    ),
    set_key("batch_size", "data.batch_size=64", "no key 'data.batch_size'", "Did you mean 'batch'?"),
    set_key("gradient accumulation", "accumulate=4", "no key 'accumulate'", "'micro_batch'? batch holds all samples"),
    set_key("num_workers", "num_workers=8", "no key 'num_workers'", "Did you mean 'data.threads'?"),
    set_key("num_epochs", "num_epochs=8", "no key 'num_epochs'", "Did you mean 'epochs'?"),
    set_key("patience", "patience=5", "no key 'patience'", "Did you mean '"),
    set_key("scheduler", "scheduler=cosine", "no key 'scheduler'", "Did you mean 'schedule'?"),
    set_key("restarts of a cosine", "cosine_restarts=3", "no key 'cosine_restarts'", "{name: cosine} falls once over"),
    set_key("arch", "arch=resnet50", "no key 'arch'", "Did you mean 'model.factory'?"),
    set_key("pretrained", "model.pretrained=true", "no key 'model.pretrained'", "Did you mean 'model.weights'?"),
    set_key("mixup_alpha", "augment.mixup_alpha=0.2", "no key 'augment.mixup_alpha'", "'augment.mixup.alpha'?"),
    set_key("label_smoothing", "label_smoothing=0.1", "no key 'label_smoothing'", "'task.args.label_smoothing'?"),
    set_key("number of GPUs as a key", "gpus=4", "no key 'gpus'", "headway train RECIPE --procs N"),
    set_key(
        "an option of another optimizer",
        "optimizer.betas=[0.9,0.99]",
        "'optimizer.betas' belongs to adam",
        "change optimizer.name",
    ),
    # Values
    set_key("a word for a number", "batch=many", "batch must be a whole number, not 'many'", "a whole number"),
    set_key("a batch of nothing", "batch=0", "batch must be at least 1, not 0", "at least 1"),
    set_key(
        "a decimal comma", "optimizer.lr=0,1", "optimizer.lr must be a number, not '0,1'", "Write 0.1, with a point"
    ),
    set_key("PyTorch's spelling of AdamW", "optimizer.name=AdamW", "not 'AdamW'", "Did you mean 'adamw'?"),
    set_key("the optimizer alone", "optimizer=sgd", "must be a mapping of keys to values, not 'sgd'", "{name: sgd}"),
    set_key("Lightning's precision", "precision=16-mixed", "not '16-mixed'", "Did you mean 'fp16'?"),
    set_key("an image of four channels", "data.channels=4", "data.channels must be 1 or 3, not 4", "1 or 3"),
    set_key("half a size", "data.size=[8]", "data.size must be a whole number or a list of 2", "a list of 2"),
    set_key(
        "a micro-batch above the batch",
        "micro_batch=64",
        "micro_batch 64 is larger than batch 30",
        "at most that",
        "recipe.yaml",
    ),
    set_key(
        "a warm-up longer than the run",
        "schedule={name: cosine, warmup_epochs: 5}",
        "schedule.warmup_epochs 5 is longer than the run",
        "train for longer",
        "recipe.yaml",
    ),
    set_key(
        "a network's name alone",
        "model.factory=resnet50",
        "'resnet50' is not an import path",
        "'headway.model:resnet50'?",
        "model.factory: ",
    ),
    set_key("a device of other libraries", "device=gpu", "there is no device 'gpu'", "Set cpu, cuda", "device: "),
    set_key(
        "a goal that nothing measures",
        "stop_at={acc: 0.9}",
        "no evaluation reports 'acc'",
        "Did you mean 'accuracy'?",
        "stop_at: ",
    ),
    set_key(
        "a shift larger than the image",
        "augment.translate=8",
        "no less than the image's side of 8",
        "at most 7",
        "augment.translate: ",
    ),
    # Files
    edit_recipe("a tab in the YAML", "batch: 30", "\tbatch: 30", "not YAML", "Indent with blanks, not with tabs"),
    edit_recipe("a key written twice", "batch: 30", "batch: 30\nbatch: 60", "the key 'batch' occurs twice", "'batch'"),
    edit_recipe("a key left out", "epochs: 2\n", "", "the key 'epochs' is missing", "'epochs'"),
    Mistake(
        name="no such recipe",
        command="train recpe.yaml",
        what="the recipe cannot be read (No such file",
        where="recpe.yaml: ",
        fix="Did you mean 'recipe.yaml'?",
    ),
    set_key(
        "the data are not there",
        "data.train=photos/train",
        "there is no such file or folder",
        "headway pack SRC DST",
        "data.train (command line): ",
    ),
    set_key(
        "a typo in the evaluation set",
        "data.eval=digits.packed/evel",
        "there is no such file or folder",
        "Did you mean 'eval'?",
        "data.eval (command line): ",
    ),
    set_key(
        "another name of the evaluation set",
        "data.eval=digits.packed/val",
        "there is no such file or folder",
        "Did you mean 'eval'?",
        "data.eval (command line): ",
    ),
    Mistake(
        name="a path from the current folder",
        command="train sub/recipe.yaml data.train=digits.packed/train",
        what="there is no such file or folder",
        where="data.train (command line): sub/digits.packed/train",
        fix="For the one in the current folder: data.train=digits.packed/train",
        copies={"sub/recipe.yaml": "recipe.yaml"},
    ),
    Mistake(
        name="the run exists already",
        command="train recipe.yaml --run first",
        what="this run folder exists",
        where="first: ",
        fix="headway train --resume first",
        texts={"first/recipe.yaml": "name: x"},
    ),
    Mistake(
        name="a report of what is not a run",
        command="report digits",
        what="not a run folder",
        where="digits: ",
        fix="headway train",
    ),
]
