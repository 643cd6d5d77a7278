# Runs PROGRAM as a node, in its own mount, pid, cgroup, UTS and IPC namespaces. PROGRAM is pid 1: when it exits, the
# kernel kills all other processes of the node.
#
#   node.sh NAME DIR PROGRAM...     DIR has run/, var/lib/, var/log/, opt/, etc/ and the files of PROGRAM
#
# Outside the namespaces it first enters a new cgroup in every hierarchy; the cgroup namespace makes these its roots.
set -eu

hierarchies() { sed -nE 's/^[^ ]+ ([^ ]+) (cgroup2?) .*/\2 \1/p' /proc/mounts; }

case ${1:-} in
  --inside) shift ;;
  # In the new cgroup namespace. A cgroup v2 group with processes cannot enable controllers for its children: the node's
  # processes move to a child, and the node's group enables every controller that it has.
  --below)
    node_cgroup=$2
    shift 2
    if [ -n "$node_cgroup" ]; then
      mkdir -p "$node_cgroup/init"
      echo $$ >"$node_cgroup/init/cgroup.procs"
      for controller in $(cat "$node_cgroup/cgroup.controllers"); do echo "+$controller" >"$node_cgroup/cgroup.subtree_control"; done
    fi
    exec unshare --mount --propagation private --uts --ipc --pid --fork --kill-child --mount-proc sh "$0" --inside "$@"
    ;;
  *)
    name=$1 node_cgroup=
    for hierarchy in $(hierarchies | tr ' ' :); do
      kind=${hierarchy%%:*} mount=${hierarchy#*:}
      case $kind in
        # Below the root, the only group that may have both processes and children with controllers.
        cgroup2) own=/ node_cgroup=$mount/$name ;;
        # A v1 hierarchy is mounted at a directory named after its controllers, systemd's after its name (name=systemd).
        *) own=$(sed -nE "s/^[0-9]+:(name=)?${mount##*/}:(.*)/\2/p" /proc/self/cgroup) ;;
      esac
      cgroup=$mount${own%/}/$name
      mkdir -p "$cgroup"
      # A new v1 cpuset has no CPUs and no memory nodes, and refuses processes until it has.
      for file in cpuset.cpus cpuset.mems; do
        [ ! -e "$cgroup/$file" ] || [ "$kind" = cgroup2 ] || cat "${cgroup%/*}/$file" >"$cgroup/$file"
      done
      echo $$ >"$cgroup/cgroup.procs"
    done
    exec unshare --cgroup sh "$0" --below "$node_cgroup" "$@"
    ;;
esac

name=$1 dir=$2
shift 2
hostname "$name"
mount --make-rshared /

# A /sys of this network namespace, and the cgroup hierarchies as this cgroup namespace shows them.
mounted=$(hierarchies)
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=0755 tmpfs /sys/fs/cgroup
echo "$mounted" | while read -r kind mount; do
  mkdir -p "$mount"
  case $kind:${mount##*/} in
    cgroup2:*) mount -t cgroup2 cgroup2 "$mount" ;;
    *:systemd) mount -t cgroup -o none,name=systemd cgroup "$mount" ;;
    *) mount -t cgroup -o "${mount##*/}" cgroup "$mount" ;;
  esac
done

# The kubelet writes these sysctls, which are the host's: bind-mounted copies take the writes.
for setting in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys \
  kernel/keys/root_maxbytes; do
  copy=$dir/sysctl/$(echo $setting | tr / .)
  mkdir -p "$dir/sysctl"
  cat "/proc/sys/$setting" >"$copy"
  mount --bind "$copy" "/proc/sys/$setting"
done

mount --rbind "$dir" /srv
for part in opt var/lib var/log run; do mount --rbind "/srv/$part" "/$part"; done
mkdir -p /srv/etc-work
mount -t overlay -o lowerdir=/etc,upperdir=/srv/etc,workdir=/srv/etc-work overlay /etc
# Hides the CNI networks that are configured on the host.
mount --bind /srv/etc/cni /etc/cni
exec "$@"
