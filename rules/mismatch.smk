rule rollouts:
    input:
        problems=pipeline.pattern("problems"),
        model=pipeline.pattern("model"),
        code=pipeline.code("rollouts"),
    output:
        pipeline.pattern("rollouts"),
    log:
        pipeline.log("rollouts", "{model}_{problems}_{engine}-{rollout}"),
    benchmark:
        pipeline.benchmark("rollouts", "{model}_{problems}_{engine}-{rollout}")
    threads: 1
    resources:
        gpu=pipeline.gpus(),
    params:
        file=pipeline.file,
        config=pipeline.parameters("rollouts"),
    shell:
        "halfmatch rollouts --config {params.file} --model {wildcards.model} --problems {wildcards.problems} "
        "--engine {wildcards.engine} --rollout {wildcards.rollout} 2>&1 | tee {log}"


rule scores:
    input:
        rollouts=pipeline.pattern("rollouts"),
        model=pipeline.pattern("model"),
        code=pipeline.code("scores"),
    output:
        pipeline.pattern("scores"),
    log:
        pipeline.log("scores", "{model}_{problems}_{engine}-{rollout}_{train}"),
    benchmark:
        pipeline.benchmark("scores", "{model}_{problems}_{engine}-{rollout}_{train}")
    threads: 1
    resources:
        gpu=pipeline.gpus(),
    params:
        file=pipeline.file,
        config=pipeline.parameters("scores"),
    shell:
        "halfmatch scores --config {params.file} --model {wildcards.model} --problems {wildcards.problems} "
        "--engine {wildcards.engine} --rollout {wildcards.rollout} --train {wildcards.train} 2>&1 | tee {log}"


rule mismatch:
    input:
        scores=pipeline.pattern("scores"),
        code=pipeline.code("mismatch"),
    output:
        metrics=pipeline.pattern("mismatch"),
        curves=pipeline.pattern("mismatch_curves"),
    log:
        pipeline.log("mismatch", "{model}_{problems}_{engine}-{rollout}_{train}"),
    benchmark:
        pipeline.benchmark("mismatch", "{model}_{problems}_{engine}-{rollout}_{train}")
    threads: 1
    params:
        file=pipeline.file,
        config=pipeline.parameters("mismatch"),
    shell:
        "halfmatch mismatch --config {params.file} --model {wildcards.model} --problems {wildcards.problems} "
        "--engine {wildcards.engine} --rollout {wildcards.rollout} --train {wildcards.train} 2>&1 | tee {log}"


rule fidelity:
    input:
        rollouts=pipeline.pattern("rollouts"),
        model=pipeline.pattern("model"),
        code=pipeline.code("fidelity"),
    output:
        pipeline.pattern("fidelity"),
    log:
        pipeline.log("fidelity", "{model}_{problems}_{engine}-{rollout}_{train}"),
    benchmark:
        pipeline.benchmark("fidelity", "{model}_{problems}_{engine}-{rollout}_{train}")
    threads: 1
    resources:
        gpu=pipeline.gpus(),
    params:
        file=pipeline.file,
        config=pipeline.parameters("fidelity"),
    shell:
        "halfmatch fidelity --config {params.file} --model {wildcards.model} --problems {wildcards.problems} "
        "--engine {wildcards.engine} --rollout {wildcards.rollout} --train {wildcards.train} 2>&1 | tee {log}"


rule origin:
    input:
        rollouts=pipeline.pattern("rollouts"),
        model=pipeline.pattern("model"),
        code=pipeline.code("origin"),
    output:
        pipeline.pattern("origin"),
    log:
        pipeline.log("origin", "{model}_{problems}_{engine}-{rollout}_{train}"),
    benchmark:
        pipeline.benchmark("origin", "{model}_{problems}_{engine}-{rollout}_{train}")
    threads: 1
    resources:
        gpu=pipeline.gpus(),
    params:
        file=pipeline.file,
        config=pipeline.parameters("origin"),
    shell:
        "halfmatch origin --config {params.file} --model {wildcards.model} --problems {wildcards.problems} "
        "--engine {wildcards.engine} --rollout {wildcards.rollout} --train {wildcards.train} 2>&1 | tee {log}"
