// cniload prints the networks that a container runtime loads from a CNI directory, as one JSON object.
//
//	cniload [--max-networks N] [--cri-o [--default NAME]] DIR
//
// Without --cri-o, cniload calls go-cni with the options of containerd 2 (initPlatform and cniLoadOptions in its package
// internal/cri/server). CRI-O's loader (loadNetworks of cri-o/ocicni) is no Go module, so its calls of libcni are made
// here. A directory that the runtime refuses is a result, too: the exit code is 0.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"
)

type network struct {
	Name       string   `json:"name"`
	CNIVersion string   `json:"cniVersion"`
	IfName     string   `json:"ifName"`
	Plugins    []string `json:"plugins"`
	// Delegates are the plugins that a meta plugin such as Multus calls.
	Delegates []string `json:"delegates,omitempty"`
	// ClusterNetwork is the network that Multus calls instead of delegates.
	ClusterNetwork string `json:"clusterNetwork,omitempty"`
}

type plugin struct {
	Type           string
	Plugins        []plugin
	Delegates      []plugin
	ClusterNetwork string
}

func (n *network) add(text []byte) {
	var parsed plugin
	// libcni has parsed the text; values of other types only lack the keys of Multus.
	json.Unmarshal(text, &parsed)
	n.Plugins = append(n.Plugins, parsed.Type)
	for _, delegate := range parsed.Delegates {
		for _, called := range append(delegate.Plugins, delegate) {
			if called.Type != "" {
				n.Delegates = append(n.Delegates, called.Type)
			}
		}
	}
	if parsed.ClusterNetwork != "" {
		n.ClusterNetwork = parsed.ClusterNetwork
	}
}

// containerd loads at most limit networks, or all networks if limit is 0.
func containerd(dir string, limit int) ([]network, error) {
	loader, err := cni.New(cni.WithMinNetworkCount(2), cni.WithPluginConfDir(dir), cni.WithPluginMaxConfNum(limit),
		cni.WithPluginDir([]string{"/opt/cni/bin"}))
	if err != nil {
		return nil, err
	}
	if err := loader.Load(cni.WithLoNetwork, cni.WithDefaultConf); err != nil {
		return nil, err
	}
	networks := []network{}
	// The first network is loopback, which is in no file.
	for _, loaded := range loader.GetConfig().Networks[1:] {
		result := network{Name: loaded.Config.Name, CNIVersion: loaded.Config.CNIVersion, IfName: loaded.IFName}
		for _, plugin := range loaded.Config.Plugins {
			result.add([]byte(plugin.Source))
		}
		networks = append(networks, result)
	}
	return networks, nil
}

// crio returns the network that CRI-O attaches, which is the first one by file name, or the first one with the name in
// cni_default_network. CRI-O skips invalid files, and also files with a plugin that is missing in plugin_dirs, which
// needs all plugins of the node and is left out here.
func crio(dir, name string) ([]network, error) {
	files, err := libcni.ConfFiles(dir, []string{".conf", ".conflist", ".json"})
	if err != nil {
		return nil, err
	}
	sort.Strings(files)
	for _, file := range files {
		list, err := load(file)
		if err != nil {
			fmt.Fprintf(os.Stderr, "cniload: skipping %s: %v\n", file, err)
			continue
		}
		if list.Name == "" {
			list.Name = filepath.Base(file)
		}
		if name != "" && list.Name != name {
			continue
		}
		result := network{Name: list.Name, CNIVersion: list.CNIVersion, IfName: "eth0"}
		for _, plugin := range list.Plugins {
			result.add(plugin.Bytes)
		}
		return []network{result}, nil
	}
	return nil, fmt.Errorf("no network %q in %s", name, dir)
}

func load(file string) (*libcni.NetworkConfigList, error) {
	if strings.HasSuffix(file, ".conflist") {
		return libcni.ConfListFromFile(file)
	}
	conf, err := libcni.ConfFromFile(file)
	if err != nil {
		return nil, err
	}
	return libcni.ConfListFromConf(conf)
}

func main() {
	limit := flag.Int("max-networks", 1, "containerd's max_conf_num; 0 loads all networks")
	isCrio := flag.Bool("cri-o", false, "load as CRI-O does")
	name := flag.String("default", "", "CRI-O's cni_default_network")
	flag.Parse()
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	var networks []network
	var err error
	if *isCrio {
		networks, err = crio(flag.Arg(0), *name)
	} else {
		networks, err = containerd(flag.Arg(0), *limit)
	}
	result := map[string]any{"networks": networks}
	if err != nil {
		result = map[string]any{"error": err.Error()}
	}
	if json.NewEncoder(os.Stdout).Encode(result) != nil {
		os.Exit(1)
	}
}
