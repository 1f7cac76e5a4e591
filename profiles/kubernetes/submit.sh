#!/bin/sh
# Runs the script $5 as a Job with $1 cores, $2 MB of memory, $3 GPUs, for at most $4 minutes, and prints the Job's name.
#   IMAGE   an image with python3, in which this folder's .venv runs
#   CLAIM   the volume claim that this folder is on, and MOUNT, where it is mounted: here and in the Job
set -eu
kubectl create --output jsonpath='{.metadata.name}' --filename - << END
apiVersion: batch/v1
kind: Job
metadata:
  generateName: halfmatch-
spec:
  backoffLimit: 0
  activeDeadlineSeconds: $(($4 * 60))
  ttlSecondsAfterFinished: 86400
  template:
    spec:
      restartPolicy: Never
      containers:
        - name: job
          image: "$IMAGE"
          command: [sh, "$5"]
          workingDir: "$PWD"
          resources:
            requests: {cpu: "$1", memory: "$2M"}
            limits: {memory: "$2M", nvidia.com/gpu: "$3"}
          volumeMounts:
            - {name: shared, mountPath: "$MOUNT"}
      volumes:
        - name: shared
          persistentVolumeClaim: {claimName: "$CLAIM"}
END
