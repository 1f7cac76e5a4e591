# Parts of the pipeline, by name: `snakemake -- mismatch_all`.
rule problems_all:
    input:
        pipeline.results("problems"),


rule model_all:
    input:
        pipeline.results("model"),


rule perfectible_all:
    input:
        pipeline.results("perfectible"),


rule mismatch_all:
    input:
        pipeline.results("mismatch"),
        pipeline.results("fidelity"),
        pipeline.results("origin"),


rule train_all:
    input:
        pipeline.results("train"),


rule evaluate_all:
    input:
        pipeline.results("evaluate"),


rule validate_all:
    input:
        pipeline.results("validate"),


# Writes what was made here into dvc.lock, so that `dvc repro` after a plain run of Snakemake does nothing.
rule record:
    input:
        lambda wildcards: pipeline.recorded(),
    log:
        pipeline.log("record"),
    shell:
        "dvc commit --force 2>&1 | tee {log}"
