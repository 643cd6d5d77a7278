//! `inpod log-level`: shows the levels of the services' logs, and has a service log more for a time.

use clap::ValueEnum as _;
use inpod_proto::log::v1::{
    GetLogLevelsRequest, GetLogLevelsResponse, LogLevel, SetLogLevelRequest,
    log_service_client::LogServiceClient,
};
use tonic::transport::Channel;

use crate::{
    arguments::{LogLevelOptions, LoggingService},
    error::CommandError,
    node::Node,
    out::Out,
    status,
    table::Table,
    time,
};

/// Sets the given level, then prints the levels in force. Fails with the worst result of a service that does
/// not answer.
pub(crate) async fn run(
    node: &Node,
    options: &LogLevelOptions,
    out: &mut Out,
) -> Result<(), CommandError> {
    if let (Some(service), Some(level)) = (options.service, options.level) {
        let request = SetLogLevelRequest {
            scope: options.scope.clone(),
            level: LogLevel::from(level).into(),
            duration: options.duration.try_into().ok(),
        };
        let mut client = connect(node, service);
        let answer = client.set_log_level(node.request(request));
        node.answer(service.name(), answer).await?;
    }
    let mut table = Table::new(&["SERVICE", "SCOPE", "LEVEL", "FOR"]);
    let mut result = Ok(());
    for service in services(node, options.service) {
        let mut client = connect(node, service);
        let answer = client.get_log_levels(node.request(GetLogLevelsRequest {}));
        match node.answer(service.name(), answer).await {
            Ok(levels) => rows(service, &levels)
                .into_iter()
                .for_each(|row| table.push(row)),
            Err(error) => result = status::worse(result, Err(error)),
        }
    }
    out.print_text(&table.take())?;
    result
}

fn connect(node: &Node, service: LoggingService) -> LogServiceClient<Channel> {
    LogServiceClient::new(node.channel(service.name()))
}

/// Returns the named service, or the services of the node; repair and injector do not run on every node.
fn services(node: &Node, named: Option<LoggingService>) -> Vec<LoggingService> {
    if let Some(service) = named {
        return vec![service];
    }
    let is_here = |service: &LoggingService| {
        let is_optional = matches!(service, LoggingService::Repair | LoggingService::Injector);
        !is_optional || node.socket(service.name()).exists()
    };
    let all = LoggingService::value_variants().iter().copied();
    all.filter(is_here).collect()
}

fn rows(service: LoggingService, levels: &GetLogLevelsResponse) -> Vec<[String; 4]> {
    let name = service.name().to_owned();
    let default = [
        name.clone(),
        "*".to_owned(),
        describe(levels.default_level()),
        String::new(),
    ];
    let scopes = levels.scopes.iter().map(|it| {
        let scope = match it.scope.as_str() {
            "" => "*".to_owned(),
            scope => scope.to_owned(),
        };
        let remaining = time::took(it.remaining);
        [name.clone(), scope, describe(it.level()), remaining]
    });
    std::iter::once(default).chain(scopes).collect()
}

fn describe(level: LogLevel) -> String {
    let name = level.as_str_name();
    let name = name.strip_prefix("LOG_LEVEL_").unwrap_or(name);
    name.to_lowercase()
}

#[cfg(test)]
mod tests {
    use inpod_proto::log::v1::ScopeLevel;

    use super::*;

    #[test]
    fn a_table_has_the_default_and_the_scopes_with_their_time() {
        let levels = GetLogLevelsResponse {
            default_level: LogLevel::Info.into(),
            scopes: vec![ScopeLevel {
                scope: "kube".to_owned(),
                level: LogLevel::Debug.into(),
                remaining: std::time::Duration::from_secs(90).try_into().ok(),
            }],
        };
        let rows = rows(LoggingService::PodEvents, &levels);
        let rows: Vec<_> = rows.iter().map(|row| row.join(" ")).collect();
        assert_eq!(rows, ["pod-events * info ", "pod-events kube debug 1m30s"]);
    }
}
