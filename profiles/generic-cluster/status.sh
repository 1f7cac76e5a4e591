#!/bin/sh
# Prints success, failed or running: how the PBS job $1 is. A scheduler that does not answer ends no job.
qstat -x -f "$1" | awk '
  /job_state = F/ { ended = 1 }
  /Exit_status = 0$/ { good = 1 }
  END { print ended ? (good ? "success" : "failed") : "running" }'
