//! The self-test, which every start runs as well.

use inpod_proto::netconfig::v1::SelfTestRequest;

use crate::drift;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_self_test_succeeds_where_rules_can_be_written() {
    let mut netconfig = drift::start(&[]).await;
    let response = netconfig.client.self_test(SelfTestRequest {}).await;
    let response = response.unwrap().into_inner();
    assert!(response.passed && response.checks[0].passed, "{response:?}");
}
