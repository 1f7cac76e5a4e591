rule problems:
    input:
        source=lambda wildcards: pipeline.source_file("problems", wildcards.problems),
        code=pipeline.code("problems"),
    output:
        problems=pipeline.pattern("problems"),
        excluded=pipeline.pattern("excluded"),
    log:
        pipeline.log("problems", "{problems}"),
    benchmark:
        pipeline.benchmark("problems", "{problems}")
    threads: 1
    params:
        file=pipeline.file,
        config=pipeline.parameters("problems"),
    shell:
        "halfmatch problems --config {params.file} --problems {wildcards.problems} 2>&1 | tee {log}"
