rule solvability:
    input:
        problems=pipeline.paths.of(
            "problems", problems=pipeline.config.solvability.problems
        ),
        model=pipeline.paths.of("model", model=pipeline.config.solvability.model),
        code=pipeline.code("solvability"),
    output:
        pipeline.pattern("shard"),
    log:
        pipeline.log("solvability", "{shard}"),
    benchmark:
        pipeline.benchmark("solvability", "{shard}")
    threads: 1
    resources:
        gpu=pipeline.gpus(),
    params:
        file=pipeline.file,
        config=pipeline.parameters("solvability"),
    shell:
        "halfmatch solvability --config {params.file} --shard {wildcards.shard} 2>&1 | tee {log}"


rule perfectible:
    input:
        problems=pipeline.paths.of(
            "problems", problems=pipeline.config.solvability.problems
        ),
        shards=pipeline.results("solvability"),
        code=pipeline.code("perfectible"),
    output:
        pipeline.pattern("perfectible"),
    log:
        pipeline.log("perfectible"),
    benchmark:
        pipeline.benchmark("perfectible")
    threads: 1
    params:
        file=pipeline.file,
        config=pipeline.parameters("perfectible"),
    shell:
        "halfmatch perfectible --config {params.file} 2>&1 | tee {log}"
