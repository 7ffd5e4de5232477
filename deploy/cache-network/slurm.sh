# A cache network for one job of Slurm, by its user: a member on each of the job's nodes.
#
# In a batch script, before `srun … python train.py`:
#
#   export ORIGINS="*.s3.eu-west-1.amazonaws.com"
#   . DIR/cache-network/slurm.sh DIR/cache-network
#
# nginx is needed on the nodes (NGINX= names it), and a home directory that all nodes have. Members
# end with the job. What they keep is below CACHE, on each node's own disk; it is removed.

: "${SLURM_JOB_ID:?it is for a job of Slurm}" "${ORIGINS:?name the hosts that may be asked}"
cache_network=$(cd "$1" && pwd)/cache-network
# Only this user may read the key of the members.
certificates=${CERTIFICATES-$HOME/.ffserve-cache/$SLURM_JOB_ID}
sh "$cache_network" certificates "$certificates" member
export CERTIFICATE="$certificates/member.pem" KEY="$certificates/member.key"
export AUTHORITY="$certificates/authority.pem"
export RUN="${TMPDIR-/tmp}/ffserve-cache-$SLURM_JOB_ID"
export CACHE="${CACHE-$RUN/cache}" PORT="${PORT-$((20000 + SLURM_JOB_ID % 10000))}"
# `mkdir` fails if another user was faster with this name.
srun --overlap --ntasks-per-node=1 --ntasks="${SLURM_JOB_NUM_NODES-1}" --cpu-bind=none sh -c '
    mkdir -m 700 "$RUN" || exit 1
    trap "rm -rf \"\$RUN\" \"\$CACHE\"" EXIT
    sh "$0" run & trap "kill \$!; wait" TERM INT; wait' "$cache_network" &
export FFSERVE_STORE_CACHE="unix:$RUN/cache.sock"
