# Checkpoints are no outputs: Snakemake removes the outputs of a job that was killed, and the next one goes on from them.
rule train:
    input:
        perfectible=pipeline.pattern("perfectible"),
        model=pipeline.paths.of("model", model=pipeline.config.solvability.model),
        code=pipeline.code("train"),
    output:
        **(
            {"weights": directory(pipeline.pattern("trained_weights"))}
            if pipeline.keeps_weights
            else {}
        ),
        log=pipeline.pattern("training_log"),
        curves=pipeline.pattern("training_curves"),
        model=directory(pipeline.pattern("trained")),
    log:
        pipeline.log("train", "{run}"),
    benchmark:
        pipeline.benchmark("train", "{run}")
    threads: 1
    resources:
        **pipeline.training_resources(),
    params:
        file=pipeline.file,
        config=pipeline.parameters("train"),
    shell:
        pipeline.training_command
        + " --config {params.file} --run {wildcards.run} 2>&1 | tee {log}"
