//! ADDs of pods that Kubernetes shows or not yet, and many at once.

use std::{sync::Arc, time::Duration};

use anyhow::ensure;
use integration::{Act, ApiProxy, ApiServer, Call, Named, Node, Pod, Spec, Verb, Verbs};

use super::Cluster;
use crate::{
    print_line,
    table::{Row, record, table},
    verbs::{known, took},
};

const BURST: usize = 100;

const PLUGIN: Duration = Duration::from_secs(30);

/// Measures by the plugin, alternating between four nodes.
pub(super) fn one(samples: usize, server: &Arc<ApiServer>) -> anyhow::Result<()> {
    let mut rows = [
        Row::new("a pod of a directory"),
        Row::new("a pod that the watch has shown"),
        Row::new("the same, a proxy before the API server"),
        Row::new("a pod that the watch does not show, by that proxy: the question past the watch"),
    ];
    let directory = Node::running()?;
    let direct = Cluster::empty(server)?;
    let (warm, _passes) = Cluster::behind_proxy(server, |_| {})?;
    let swallow = |proxy: &ApiProxy| proxy.fault(Verb::Watch, "pods", usize::MAX, Act::Swallow);
    let (cold, proxy) = Cluster::behind_proxy(server, swallow)?;
    for sample in 0..samples {
        let name = format!("one-{sample}");
        let times = [
            of_directory(&directory)?,
            shown(&direct, &name)?,
            shown(&warm, &name)?,
            not_shown(&cold, &proxy, &name)?,
        ];
        record(&mut rows, times);
    }
    table(
        "ADD of an enrolled pod, exec to exit, by where pods come from",
        &rows,
    )
}

fn of_directory(node: &Node) -> anyhow::Result<Duration> {
    let pod = node.sandbox(Spec::new("one-more").ambient())?;
    known(node, &pod.spec)?;
    let time = took(&node.call(Call::add, &pod))?;
    node.del(&pod)?;
    Ok(time)
}

fn shown(cluster: &Cluster, name: &str) -> anyhow::Result<Duration> {
    let pod = cluster.create(name)?;
    cluster.until_shown(name)?;
    let time = took(&cluster.node.call(Call::add, &pod))?;
    cluster.delete(&pod)?;
    Ok(time)
}

/// Hides the pod from the watch, whose speed must not matter.
fn not_shown(cluster: &Cluster, proxy: &ApiProxy, name: &str) -> anyhow::Result<Duration> {
    let before = proxy.asked(Verb::Get, "pods").len();
    let pod = cluster.create(name)?;
    let time = took(&cluster.node.call(Call::add, &pod))?;
    let asked = proxy.asked(Verb::Get, "pods").len() - before;
    ensure!(asked > 0, "the ADD has not asked for the pod");
    cluster.delete(&pod)?;
    Ok(time)
}

/// Measures many ADDs at once without processes, beside as many one at a time.
pub(super) fn burst(samples: usize, server: &Arc<ApiServer>) -> anyhow::Result<()> {
    let cluster = Cluster::empty(server)?;
    let verbs = Verbs::at(&inpod_service::socket(
        &cluster.node.run_dir(),
        "pod-events",
    ))?;
    let mut rows = [
        Row::new("one alone"),
        Row::new("each of 100 at once, from the call of the first"),
    ];
    for round in 0..samples.div_ceil(20) {
        let [alone, at_once] = &mut rows;
        let pods = sandboxes(&cluster, &format!("alone-{round}"), BURST.min(samples))?;
        for pod in &pods {
            alone.times.extend(add(&verbs, std::slice::from_ref(pod))?);
        }
        end(&cluster, &pods)?;
        let pods = sandboxes(&cluster, &format!("burst-{round}"), BURST)?;
        at_once.times.extend(add(&verbs, &pods)?);
        end(&cluster, &pods)?;
    }
    table("ADD by gRPC, pods that the watch has shown", &rows)?;
    let [alone, at_once] = &rows;
    let ratio = |share| at_once.quantile(share) / alone.quantile(0.5);
    print_line(&format!(
        "\nOf 100 at once, p50 is {:.1} and p99 is {:.1} times the median of one alone.",
        ratio(0.5),
        ratio(0.99)
    ))
}

fn sandboxes(cluster: &Cluster, prefix: &str, count: usize) -> anyhow::Result<Vec<Pod>> {
    let names: Vec<_> = (0..count)
        .map(|number| format!("{prefix}-{number}"))
        .collect();
    let pods = cluster.node.sandboxes(cluster.create_all(&names)?)?;
    names
        .iter()
        .try_for_each(|name| cluster.until_shown(name))?;
    Ok(pods)
}

fn add(verbs: &Verbs, pods: &[Pod]) -> anyhow::Result<Vec<Duration>> {
    let named: Vec<_> = pods.iter().map(Named::of).collect();
    let called = named.iter().map(|named| verbs.add(named, PLUGIN)).collect();
    let answers = verbs.answers(called)?.into_iter();
    let times = answers.map(|answer| answer.result.map(|_| answer.took));
    Ok(times.collect::<Result<_, _>>()?)
}

fn end(cluster: &Cluster, pods: &[Pod]) -> anyhow::Result<()> {
    pods.iter().try_for_each(|pod| cluster.delete(pod))
}
