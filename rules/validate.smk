# One job a run: the engine starts once for all the weights that the run kept along its training.
rule validate:
    input:
        problems=pipeline.benchmarks(),
        model=pipeline.paths.of("model", model=pipeline.config.solvability.model),
        weights=pipeline.pattern("trained_weights"),
        code=pipeline.code("validate"),
    output:
        counts=pipeline.pattern("validation"),
        metrics=pipeline.pattern("validation_metrics"),
    log:
        pipeline.log("validate", "{run}_{engine}-{rollout}"),
    benchmark:
        pipeline.benchmark("validate", "{run}_{engine}-{rollout}")
    threads: 1
    resources:
        gpu=pipeline.gpus(),
    params:
        file=pipeline.file,
        config=pipeline.parameters("validate"),
    shell:
        "halfmatch validate --config {params.file} --run {wildcards.run} --engine {wildcards.engine} "
        "--rollout {wildcards.rollout} 2>&1 | tee {log}"
