rule model:
    input:
        source=lambda wildcards: pipeline.source_file("models", wildcards.model),
        start=lambda wildcards: pipeline.start(wildcards.model),
        code=pipeline.code("model"),
    output:
        directory(pipeline.pattern("model")),
    log:
        pipeline.log("model", "{model}"),
    benchmark:
        pipeline.benchmark("model", "{model}")
    threads: 1
    resources:
        gpu=lambda wildcards: pipeline.gpus_to_make(wildcards.model),
    params:
        file=pipeline.file,
        config=pipeline.parameters("model"),
    shell:
        "halfmatch model --config {params.file} --model {wildcards.model} 2>&1 | tee {log}"
