rule evaluate:
    input:
        problems=pipeline.pattern("problems"),
        model=lambda wildcards: pipeline.weights(wildcards.run),
        code=pipeline.code("evaluate"),
    output:
        counts=pipeline.pattern("evaluation"),
        responses=pipeline.pattern("evaluated_responses"),
        metrics=pipeline.pattern("evaluation_metrics"),
    log:
        pipeline.log("evaluate", "{run}_{problems}_{engine}-{rollout}"),
    benchmark:
        pipeline.benchmark("evaluate", "{run}_{problems}_{engine}-{rollout}")
    threads: 1
    resources:
        gpu=pipeline.gpus(),
    params:
        file=pipeline.file,
        config=pipeline.parameters("evaluate"),
    shell:
        "halfmatch evaluate --config {params.file} --run {wildcards.run} --problems {wildcards.problems} "
        "--engine {wildcards.engine} --rollout {wildcards.rollout} 2>&1 | tee {log}"
