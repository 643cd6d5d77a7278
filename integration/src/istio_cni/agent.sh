# Runs a real istio-cni with the mounts of its chart (with shareHostNetworkNamespace: it shares the node's network).
#
#   agent.sh DIR PROGRAMS COMMAND...
#
# DIR has host/ (the node's directories) and account/ (token and ca.crt). Call it in a new mount namespace.
set -eu
dir=$1 programs=$2
shift 2
root=$dir/root
mkdir -p "$root" "$dir/upper" "$dir/work"
mount -t overlay -o "lowerdir=/,upperdir=$dir/upper,workdir=$dir/work" overlay "$root"
for part in proc dev sys run tmp; do mount --rbind "/$part" "$root/$part"; done
mkdir -p "$root/host/proc" "$root/host/run" "$root/host/var/run" "$root/opt/cni/bin" "$root/run/secrets"
for part in etc/cni/net.d opt/cni/bin; do
  mkdir -p "$root/host/$part"
  mount --bind "$dir/host/$part" "$root/host/$part"
done
mount --rbind /proc "$root/host/proc"
for part in run var/run; do
  mkdir -p "$root/host/$part/netns"
  mount --rbind /run/netns "$root/host/$part/netns"
done
mount -t tmpfs none "$root/opt/cni/bin"
touch "$root/opt/cni/bin/istio-cni" "$root/usr/local/bin/install-cni"
mount --bind "$programs/istio-cni" "$root/opt/cni/bin/istio-cni"
mount --bind "$programs/install-cni" "$root/usr/local/bin/install-cni"
mount -t tmpfs none "$root/run/secrets"
mkdir -p "$root/run/secrets/kubernetes.io/serviceaccount"
cp "$dir"/account/* "$root/run/secrets/kubernetes.io/serviceaccount/"
exec chroot "$root" "$@"
