# Jobs that show what profiles/slurm does for them. Two bear names of the pipeline's rules, so that its resources hold.
localrules:
    all,


rule all:
    input:
        "gpu.txt",
        "again.txt",
        "late.txt",


# Which GPUs a job that asks for one sees, and what it was granted.
rule rollouts:
    output:
        "gpu.txt",
    resources:
        gpu=1,
    shell:
        "echo CUDA_VISIBLE_DEVICES=${{CUDA_VISIBLE_DEVICES:-}} > {output}; scontrol show job $SLURM_JOB_ID >> {output}"


# Fails the first time; leaves what each attempt was granted.
rule mismatch:
    output:
        "again.txt",
    resources:
        number=lambda wildcards, attempt: attempt,
    shell:
        "scontrol show job $SLURM_JOB_ID > granted{resources.number}.txt; [ {resources.number} = 2 ]; touch {output}"


# Takes longer than its time limit.
rule endless:
    output:
        "late.txt",
    retries: 0
    resources:
        runtime=1,
    shell:
        "sleep 600; touch {output}"
