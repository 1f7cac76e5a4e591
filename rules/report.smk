rule report:
    input:
        excluded=pipeline.results("problems", "excluded"),
        perfectible=pipeline.pattern("perfectible"),
        rollouts=pipeline.results("rollouts"),
        scores=pipeline.results("scores"),
        mismatch=pipeline.results("mismatch"),
        fidelity=pipeline.results("fidelity"),
        origin=pipeline.results("origin"),
        training=pipeline.results("train", "training_log"),
        counts=pipeline.results("evaluate", "evaluation"),
        responses=pipeline.results("evaluate", "evaluated_responses"),
        evaluation=pipeline.results("evaluate"),
        validation=pipeline.results("validate"),
        preset="config/paper.yaml",
        code=pipeline.code("report"),
    output:
        page=report(
            pipeline.pattern("report"),
            caption="../workflow/report/page.rst",
            category="Report",
        ),
        headline=pipeline.pattern("headline"),
        figures=report(
            directory(pipeline.pattern("figures")),
            patterns=["{name}.png"],
            caption="../workflow/report/figure.rst",
            category="Figures",
        ),
    log:
        pipeline.log("report"),
    benchmark:
        pipeline.benchmark("report")
    threads: 1
    params:
        file=pipeline.file,
        config=pipeline.parameters("report"),
    shell:
        "halfmatch report --config {params.file} 2>&1 | tee {log}"
