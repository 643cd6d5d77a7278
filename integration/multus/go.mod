module inpod.io/multus

go 1.24.11

require gopkg.in/k8snetworkplumbingwg/multus-cni.v4 v4.2.4
