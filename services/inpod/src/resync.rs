//! `inpod resync`: re-verifies pods, repairs drift and retries pending work.

use inpod_proto::podevents::v1::ResyncRequest;

use crate::{
    arguments::ResyncOptions,
    error::CommandError,
    json,
    node::{Node, PodEvents},
    out::Out,
    pods,
};

/// Resyncs the pods and prints their state afterwards.
pub(crate) async fn run(
    node: &Node,
    options: &ResyncOptions,
    out: &mut Out,
) -> Result<(), CommandError> {
    let format = options.output.format;
    let request = ResyncRequest {
        pod: options.pod.clone(),
    };
    let answer = node.ask(request, PodEvents::resync).await?;
    match json::structured(format, &answer, "ResyncResponse")? {
        Some(text) => out.print_line(&text),
        None => out.print_text(&pods::table(&answer.pods, format)),
    }
}
