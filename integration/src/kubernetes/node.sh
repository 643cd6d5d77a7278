# A machine of its own for one node, as its first process: own mounts, pids, cgroups, names. It ends with all that runs
# in it.
#
#   node.sh NAME DIR PROGRAM...     DIR has run/, var/lib/, var/log/, opt/, etc/ and what PROGRAMs need
#
# First outside: into a cgroup of its own in every hierarchy, which the new cgroup namespace then shows as the root.
set -eu

hierarchies() { sed -nE 's/^[^ ]+ ([^ ]+) (cgroup2?) .*/\2 \1/p' /proc/mounts; }

case ${1:-} in
  --inside) shift ;;
  # The machine's groups are the roots now. Where there is one hierarchy for all (cgroup v2), a group with processes of its
  # own gives no controller to those below it: the machine's go one below, and it passes on what it was given itself.
  --below)
    machine=$2
    shift 2
    if [ -n "$machine" ]; then
      mkdir -p "$machine/init"
      echo $$ >"$machine/init/cgroup.procs"
      for controller in $(cat "$machine/cgroup.controllers"); do echo "+$controller" >"$machine/cgroup.subtree_control"; done
    fi
    exec unshare --mount --propagation private --uts --ipc --pid --fork --kill-child --mount-proc sh "$0" --inside "$@"
    ;;
  *)
    name=$1 machine=
    for hierarchy in $(hierarchies | tr ' ' :); do
      kind=${hierarchy%%:*} mount=${hierarchy#*:}
      case $kind in
        # At the root, which alone may have both processes and groups with controllers.
        cgroup2) own=/ machine=$mount/$name ;;
        # A hierarchy's directory is named after its controllers; a named one is name=systemd.
        *) own=$(sed -nE "s/^[0-9]+:(name=)?${mount##*/}:(.*)/\2/p" /proc/self/cgroup) ;;
      esac
      cgroup=$mount${own%/}/$name
      mkdir -p "$cgroup"
      # A new cpuset has no processor and no memory, and takes no process.
      for file in cpuset.cpus cpuset.mems; do
        [ ! -e "$cgroup/$file" ] || [ "$kind" = cgroup2 ] || cat "${cgroup%/*}/$file" >"$cgroup/$file"
      done
      echo $$ >"$cgroup/cgroup.procs"
    done
    exec unshare --cgroup sh "$0" --below "$machine" "$@"
    ;;
esac

name=$1 dir=$2
shift 2
hostname "$name"
mount --make-rshared /

# The network's own /sys, and the cgroups below this node's.
known=$(hierarchies)
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=0755 tmpfs /sys/fs/cgroup
echo "$known" | while read -r kind mount; do
  mkdir -p "$mount"
  case $kind:${mount##*/} in
    cgroup2:*) mount -t cgroup2 cgroup2 "$mount" ;;
    *:systemd) mount -t cgroup -o none,name=systemd cgroup "$mount" ;;
    *) mount -t cgroup -o "${mount##*/}" cgroup "$mount" ;;
  esac
done

# What a kubelet sets is the machine's: it gets copies.
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
# Networks that are configured on this computer are none of the machine's.
mount --bind /srv/etc/cni /etc/cni
exec "$@"
