//! The service `inpod.log.v1`, by which operators change the levels of the log.

use std::{sync::Arc, time::Duration};

use inpod_proto::{
    Invalid, into_status,
    log::v1::{
        GetLogLevelsRequest, GetLogLevelsResponse, LogLevel, ScopeLevel, SetLogLevelRequest,
        SetLogLevelResponse, log_service_server,
    },
};
use inpod_types::Failure;
use tonic::{Request, Response, Status};
use tracing::Level;

use crate::log::Levels;

const DEFAULT_DURATION: Duration = Duration::from_secs(600);
const MAX_DURATION: Duration = Duration::from_secs(24 * 60 * 60);
const MAX_SCOPE_BYTES: usize = 128;

#[derive(Debug)]
pub(super) struct LogService(pub(super) Arc<Levels>);

/// The parsed request of SetLogLevel.
#[derive(Debug, PartialEq, Eq)]
struct Change {
    scope: String,
    /// The default level if unset.
    level: Option<Level>,
    duration: Duration,
}

impl TryFrom<SetLogLevelRequest> for Change {
    type Error = Invalid;

    fn try_from(request: SetLogLevelRequest) -> Result<Self, Invalid> {
        let level = LogLevel::try_from(request.level)
            .map_err(|_| Invalid::new("level", format!("there is no level {}", request.level)))?;
        let duration = match request.duration {
            None => DEFAULT_DURATION,
            Some(duration) => Duration::try_from(duration)
                .ok()
                .filter(|duration| !duration.is_zero() && *duration <= MAX_DURATION)
                .ok_or_else(|| Invalid::new("duration", "it is not above 0 and at most 24 h"))?,
        };
        if !is_scope(&request.scope) {
            return Err(Invalid::new(
                "scope",
                "it is no module: at most 128 letters, digits and _, with :: between them",
            ));
        }
        Ok(Self {
            scope: request.scope,
            level: parse_level(level),
            duration,
        })
    }
}

fn is_scope(text: &str) -> bool {
    let is_name = |name: &str| {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        !name.is_empty() && name.chars().all(is_word)
    };
    text.is_empty() || (text.len() <= MAX_SCOPE_BYTES && text.split("::").all(is_name))
}

fn parse_level(level: LogLevel) -> Option<Level> {
    match level {
        LogLevel::Unspecified => None,
        LogLevel::Error => Some(Level::ERROR),
        LogLevel::Warn => Some(Level::WARN),
        LogLevel::Info => Some(Level::INFO),
        LogLevel::Debug => Some(Level::DEBUG),
        LogLevel::Trace => Some(Level::TRACE),
    }
}

fn to_wire(level: Level) -> LogLevel {
    match level {
        Level::ERROR => LogLevel::Error,
        Level::WARN => LogLevel::Warn,
        Level::INFO => LogLevel::Info,
        Level::DEBUG => LogLevel::Debug,
        Level::TRACE => LogLevel::Trace,
    }
}

#[tonic::async_trait]
impl log_service_server::LogService for LogService {
    async fn get_log_levels(
        &self,
        _request: Request<GetLogLevelsRequest>,
    ) -> Result<Response<GetLogLevelsResponse>, Status> {
        let scopes = self.0.scopes().into_iter();
        let scopes = scopes.map(|(scope, level, remaining)| ScopeLevel {
            scope,
            level: to_wire(level).into(),
            remaining: remaining.try_into().ok(),
        });
        Ok(Response::new(GetLogLevelsResponse {
            default_level: to_wire(self.0.default_level()).into(),
            scopes: scopes.collect(),
        }))
    }

    async fn set_log_level(
        &self,
        request: Request<SetLogLevelRequest>,
    ) -> Result<Response<SetLogLevelResponse>, Status> {
        let change = Change::try_from(request.into_inner())
            .map_err(|invalid| into_status(&Failure::from(invalid)))?;
        match change.level {
            Some(level) => self
                .0
                .set(&change.scope, level, change.duration)
                .map_err(|failure| into_status(&failure))?,
            None => self.0.end(&change.scope),
        }
        Ok(Response::new(SetLogLevelResponse {}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(scope: &str, level: i32, seconds: Option<i64>) -> Result<Change, Invalid> {
        let mut request = SetLogLevelRequest {
            scope: scope.to_owned(),
            level,
            duration: None,
        };
        if let Some(seconds) = seconds {
            request.duration.get_or_insert_default().seconds = seconds;
        }
        Change::try_from(request)
    }

    #[test]
    fn a_request_names_the_field_that_is_malformed() {
        let long = "a".repeat(MAX_SCOPE_BYTES + 1);
        for (scope, level, seconds, field) in [
            ("pod_events::", 4, None, "scope"),
            ("pod-events", 4, None, "scope"),
            ("a=debug", 4, None, "scope"),
            (&long, 4, None, "scope"),
            ("", 9, None, "level"),
            ("", 4, Some(0), "duration"),
            ("", 4, Some(-1), "duration"),
            ("", 4, Some(24 * 3600 + 1), "duration"),
        ] {
            let refused = parse(scope, level, seconds).unwrap_err();
            assert_eq!(refused.field(), field, "{scope} {level} {seconds:?}");
        }
        let change = parse("pod_events::tasks", 0, Some(5)).unwrap();
        assert_eq!((change.level, change.duration.as_secs()), (None, 5));
        let change = parse("", 4, None).unwrap();
        assert_eq!(
            (change.level, change.duration),
            (Some(Level::DEBUG), DEFAULT_DURATION)
        );
    }
}
