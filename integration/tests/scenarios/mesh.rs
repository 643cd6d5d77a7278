//! A mesh of several nodes: istiod and CoreDNS, kube-proxy, a chain of CNI plugins per node, inpod and, except in
//! `nodes`, the stock ztunnel.

mod apps;
mod beside;
mod control;
mod identity;
mod life;
mod migration;
mod nodes;
mod policy;
mod power;
mod sidecars;
mod upstream;
mod wire;
