"""Names that PyTorch, timm, Lightning, Keras, Transformers and YOLO give to the keys of a training recipe.

A message uses them to name the key that was meant. A name that is a key of ours, only in another part, needs no entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headway.core.key_suggestions import KeySynonym

_LENGTH = "A run's length is given in epochs, and fractions are fine: epochs = steps x batch / images."
_KEPT = "The best weights are always kept, as weights.safetensors in the run folder: remove the key."
_PARTS = "batch holds all samples of a step, micro_batch those that go through the network at once."
_BATCH = "It counts the samples of a step over all ranks and micro-batches."
_PROCS = "The number of processes is an option of the command: headway train RECIPE --procs N."
_SHARED = f"{_PROCS} How many of them share an image or the experts is parallel.ranks, of spatial and experts."
_ROUND = "It is a key of parallel: {strategy: local}."
_FOLDER = "The run folder is no key: headway train RECIPE --run FOLDER, in Python headway.train(recipe, run=FOLDER)."
_RESUME = "A run continues with its own recipe: headway train --resume RUN, in Python headway.resume(RUN)."
_NETWORK = "Arguments of the network's factory go to model.args."
_CLASSES = "The network gets the number of classes from the data: remove the key."
_BOX = "The largest centred box is resized to it; data.crop chooses another box."

# (names, keys of which the first that exists is meant, note)
_TABLE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    # Data
    ("train_dir train_data train_path train_folder train_set data_dir data_path dataset dataset_path root "
     "imagefolder path",
     ("data.train",), ""),
    ("val val_dir val_data val_path val_set valid validation validation_data validation_dir eval_data eval_dir "
     "eval_set "
     "test test_dir test_data test_set", ("data.eval",), ""),
    ("size image_size img_size imgsz input_size input_shape resolution resize target_size", ("data.size",), ""),
    ("crop_size", ("data.size",), _BOX),
    ("crop_pct center_crop", ("data.crop.share",), ""),
    ("random_resized_crop rrc", ("data.crop",), "Write data.crop: random."),
    ("workers num_workers n_workers dataloader_num_workers nworkers num_threads", ("data.threads",),
     "Images are decoded by threads of this process."),
    ("prefetch_factor prefetch", ("data.prefetch_batches",), ""),
    ("pin_memory persistent_workers non_blocking", (), "Batches always reach a GPU from pinned memory: remove it."),
    ("shuffle",
     ("data.window",), "Training samples are always shuffled over the whole set; a window makes that local."),
    ("drop_last", (), "Every step is full, and every sample is served once an epoch: remove the key."),
    ("num_classes nb_classes n_classes nc classes", (), _CLASSES),
    ("in_channels in_chans num_channels grayscale", ("data.channels",), ""),
    ("cache_dir", ("data.cache_folder",), ""),
    ("cache_images cache_ram", ("data.cache",), ""),
    # Augmentation
    ("augmentation augmentations aug data_augmentation", ("augment",), ""),
    ("transforms", ("transform", "augment"), ""),
    ("hflip h_flip fliplr horizontal_flip random_flip random_horizontal_flip",
     ("augment.flip",), ""),
    ("vflip v_flip flipud vertical_flip random_vertical_flip", ("augment.flip",), "Write augment.flip: vertical."),
    ("rotate degrees rotation_degrees random_rotation", ("augment.rotation.degrees",), ""),
    ("random_crop padding shift", ("augment.translate",), ""),
    ("rand_augment randaugment auto_augment autoaugment aa trivial_augment trivialaugment", ("augment.policy",), ""),
    ("color_jitter colour_jitter colorjitter", ("augment.jitter",), ""),
    ("reprob random_erase erasing", ("augment.random_erasing",), ""),
    ("mixup_alpha", ("augment.mixup.alpha",), ""),
    ("cutmix_alpha", ("augment.cutmix.alpha",), ""),
    ("normalize normalization", ("augment.normalise",), ""),
    # Network
    ("arch architecture net network backbone model_name model_type", ("model.factory",), ""),
    ("pretrained",
     ("model.weights",), "For a factory that loads weights by itself, write model.args: {pretrained: true}."),
    ("pretrained_weights init_from load_from finetune finetune_from initial_checkpoint", ("model.weights",), ""),
    ("drop drop_rate dropout dropout_rate drop_path drop_path_rate depth width_mult stem_width",
     ("model.args",), _NETWORK),
    ("ema_decay model_ema use_ema swa", ("model.ema.half_life_steps",), ""),
    ("bn_momentum", ("model.batch_norm.momentum",), ""),
    ("unfreeze unfreeze_epoch unfreeze_after", ("model.unfreeze_at",), ""),
    ("freeze_backbone frozen freeze_layers", ("model.freeze",), ""),
    ("sync_bn sync_batchnorm", ("comm.batch_norm",), "Write comm.batch_norm: sync."),
    # Task
    ("criterion loss loss_fn loss_function", ("task.loss", "task.factory"), ""),
    ("label_smoothing smoothing", ("task.args.label_smoothing",), ""),
    ("metrics metric", ("task.metrics", "task.factory"), ""),
    # Optimizer and schedule
    ("learning_rate base_lr init_lr initial_lr lr0 eta", ("optimizer.lr",), ""),
    ("opt optim solver", ("optimizer.name",), ""),
    ("wd l2 decay", ("optimizer.weight_decay",), ""),
    ("beta1 beta2 b1 b2 beta_1 beta_2 adam_beta1 adam_beta2", ("optimizer.betas",), "Write both: [0.9, 0.999]."),
    ("epsilon adam_epsilon opt_eps", ("optimizer.eps",), ""),
    ("clip_grad grad_clip gradient_clip gradient_clip_val clip_grad_norm max_grad_norm max_norm grad_norm_clip "
     "clipnorm",
     ("optimizer.clip_norm",), ""),
    ("nesterov", ("optimizer.name",), "Nesterov's momentum is the optimizer nag: write optimizer.name: nag."),
    ("param_groups parameter_groups", ("optimizer.groups",), ""),
    ("llrd layerwise_lr lr_decay_rate", ("optimizer.layer_decay",), ""),
    ("scheduler lr_scheduler lr_schedule sched scheduler_name lr_policy", ("schedule.name",), ""),
    ("cosine cosine_lr cosine_annealing cosine_decay", ("schedule.name",), "Write schedule: {name: cosine}."),
    ("cosine_restarts warm_restarts cosine_warm_restarts t_0 t_mult cycle_mul", ("schedule.name",),
     "schedule: {name: cosine} falls once over the whole run, without restarts."),
    ("t_max", ("schedule.name",), "A cosine schedule ends with the run: only epochs sets its length."),
    ("warmup warmup_steps num_warmup_steps warmup_iters warmup_ratio linear_warmup", ("schedule.warmup_epochs",), ""),
    ("warmup_lr warmup_factor warmup_bias_lr", ("schedule.warmup_start",), "It is a factor of optimizer.lr."),
    ("eta_min min_lr lr_min lrf final_lr end_lr", ("schedule.end",), "It is a factor of optimizer.lr."),
    ("step_size decay_epochs", ("schedule.every_epochs",), ""),
    ("decay_rate lr_decay lr_gamma lr_step", ("schedule.gamma",), ""),
    ("milestones decay_milestones", ("schedule.milestones_epochs",), ""),
    # The run
    ("batch_size bs batchsize train_batch_size global_batch_size total_batch_size mini_batch_size", ("batch",), _BATCH),
    ("per_device_train_batch_size batch_size_per_gpu per_device_batch_size", ("batch.per_device",), ""),
    ("eval_batch_size val_batch_size validation_batch_size test_batch_size per_device_eval_batch_size",
     ("evaluate.batch",), ""),
    ("accumulate accumulation accum accum_iter accum_steps accumulation_steps grad_accum grad_accum_steps "
     "grad_accumulation accumulate_grad_batches gradient_accumulation gradient_accumulation_steps update_freq "
     "batch_split", ("micro_batch",), _PARTS),
    ("num_epochs n_epochs nb_epoch nb_epochs max_epochs total_epochs num_train_epochs epoch", ("epochs",), ""),
    ("max_steps num_steps total_steps train_steps max_iter max_iters iterations num_iterations steps",
     ("epochs",), _LENGTH),
    ("random_seed manual_seed seed_everything", ("seed",), ""),
    ("optim_bits optimizer_dtype state_dtype exp_avg_dtype exp_avg_sq_dtype bf16_stochastic_round stochastic_rounding",
     ("optimizer.precision",), "Write precision: bf16 in optimizer."),
    ("amp use_amp mixed_precision fp16 bf16 half dtype use_fp16", ("precision",), ""),
    ("gpu cuda use_cuda accelerator no_cuda", ("device",), ""),
    ("gpus num_gpus n_gpu devices nproc_per_node world_size num_processes nnodes num_nodes nodes ddp "
     "distributed strategy",
     (), _PROCS),
    ("parallel.gpus parallel.num_gpus parallel.n_gpu parallel.devices parallel.procs parallel.num_procs "
     "parallel.world_size parallel.num_processes parallel.workers parallel.num_workers parallel.size", (), _SHARED),
    ("parallel.steps parallel.every parallel.h parallel.sync_every parallel.num_steps parallel.local_steps "
     "parallel.inner_steps", ("parallel.every_steps",), _ROUND),
    ("parallel.type parallel.name parallel.kind parallel.mode parallel.method", ("parallel.strategy",), ""),
    ("parallel.pattern parallel.regex", ("parallel.match", "parallel.layers"), ""),
    ("parallel.staleness parallel.max_staleness", ("parallel.ahead",), ""),
    ("parallel.stage", ("parallel.what",), "Stage 1 is what: optimizer, and stage 3 what: all."),
    ("torch_compile torchcompile compile_model jit", ("compile",), ""),
    ("gradient_checkpointing grad_checkpointing activation_checkpoint checkpoint_activations use_checkpoint",
     ("activation_checkpointing",), ""),
    ("memory_format", ("channels_last",), ""),
    ("early_stop stop_early", ("early_stopping",), "Write early_stopping: {patience_epochs: 5}."),
    ("patience early_stopping_patience", ("early_stopping.patience_epochs",), ""),
    ("monitor metric_for_best_model", ("early_stopping.metric",), ""),
    ("target_accuracy target_metric stop_accuracy", ("stop_at",), "Write stop_at: {accuracy: 0.98}."),
    ("tta test_time_augmentation", ("evaluate.flip",), ""),
    ("eval_interval eval_every eval_freq eval_steps val_interval validate_every val_check_interval "
     "check_val_every_n_epoch evaluation_strategy", ("evaluate.every_epochs",), ""),
    ("save_interval save_every save_freq save_steps save_period checkpoint_interval checkpoint_every",
     ("checkpoint.every_epochs",), ""),
    ("save_top_k save_total_limit keep_last checkpoint_hist max_to_keep", ("checkpoint.keep",), ""),
    ("save_best save_best_only load_best_model_at_end restore_best_weights", (), _KEPT),
    ("log_interval log_every log_every_n_steps logging_steps print_freq print_every", ("log_every_steps",), ""),
    ("logger loggers wandb tensorboard mlflow tb report_to use_wandb", ("sinks",), ""),
    ("experiment experiment_name exp_name run_name project", ("name",), ""),
    ("output output_dir out_dir run_dir log_dir logdir save_dir default_root_dir workdir work_dir", (), _FOLDER),
    ("resume resume_from resume_from_checkpoint ckpt_path", (), _RESUME),
)  # fmt: skip


def _iterate_table() -> Iterator[tuple[str, KeySynonym]]:
    for names, keys, note in _TABLE:
        for name in names.split():
            yield name, KeySynonym(keys, note)


KEY_SYNONYMS: Mapping[str, KeySynonym] = dict(_iterate_table())
"""Meaning of each name, which is in snake case."""

VALUE_SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "optimizer.name": {
        "nesterov": "nag",
        "sgdnesterov": "nag",
        "momentum": "sgd",
        "rmsprop": "rmsprop_sgd begins with RMSprop and ends with SGD.",
        "radam": "Adam with a warm-up comes near it: adamw with schedule.warmup_epochs.",
        "adagrad": "Adam normalises by the gradient's history too: adamw.",
        **dict.fromkeys(
            ("shampoo", "distributedshampoo", "kfac"), "soap is Adam in the eigenbasis of Shampoo's preconditioner."
        ),
        "lion": "signum steps by the sign of a momentum too.",
        "dcasgd": "It is no optimizer, but asynchronous training that corrects for delay. Keep sgd, and write parallel:"
        " {strategy: async, compensate: constant}.",
    },
    "schedule.name": {
        "none": "constant",
        "fixed": "constant",
        "linear": "Write schedule: {name: polynomial, power: 1}.",
        "poly": "polynomial",
        "onecycle": "triangular",
        "onecyclelr": "triangular",
        "cosinerestarts": "Take cosine: it falls once over the whole run, without restarts.",
        "cosineannealingwarmrestarts": "Take cosine: it falls once over the whole run, without restarts.",
        "cosineannealing": "cosine",
        "cosineannealinglr": "cosine",
        "steplr": "step",
        "multisteplr": "multi_step",
        "exponentiallr": "exponential",
        "plateau": "None waits for a plateau. Take cosine, or a factory of your own.",
        "reducelronplateau": "None waits for a plateau. Take cosine, or a factory of your own.",
    },
    "augment.policy.name": {
        "randaugment": "rand",
        "randaug": "rand",
        **dict.fromkeys(("autoaugment", "autoaug", "aa"), "auto"),
        **dict.fromkeys(("trivialaugment", "trivialaugmentwide", "ta"), "trivial"),
    },
    "parallel.strategy": {
        **dict.fromkeys(("ddp", "dp", "dataparallel", "horovod", "sync"), "data"),
        **dict.fromkeys(("zero", "zero1", "zero2"), "sharded"),
        **dict.fromkeys(("fsdp", "fsdp2", "zero3"), "Write parallel: {strategy: sharded, what: all}."),
        **dict.fromkeys(("localsgd", "postlocalsgd", "diloco"), "local"),
        **dict.fromkeys(("moe", "expertparallel"), "experts"),
        **dict.fromkeys(("asgd", "asynchronous", "parameterserver", "ps"), "async"),
    },
    "precision": {
        **dict.fromkeys(("amp", "mixed", "true"), "auto"),
        **dict.fromkeys(("16", "half", "float16", "16mixed", "mixedfloat16"), "fp16"),
        **dict.fromkeys(("bfloat16", "bf16mixed", "mixedbfloat16"), "bf16"),
        **dict.fromkeys(("32", "full", "single", "float32", "float", "tf32", "highest"), "fp32"),
    },
}
"""By dotted key: our name of a value, or a sentence, by its name elsewhere without blanks, hyphens and capitals."""
