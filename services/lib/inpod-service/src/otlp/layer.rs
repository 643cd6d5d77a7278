//! What `tracing` tells of spans, as spans of OpenTelemetry. They wait in the registry, beside what the log keeps.

use tracing::{
    Id, Span, Subscriber,
    span::{Attributes, Record},
};
use tracing_subscriber::{
    Registry,
    layer::{Context, Layer as Listens},
    registry::{LookupSpan, SpanRef},
};

use super::{
    export::Queue,
    open::{Open, Place},
};

/// Gives spans that ended to the queue. It waits for nothing and asks nobody: a call is as quick as without it.
#[derive(Debug)]
pub(crate) struct Layer(pub(super) Queue);

impl<S> Listens<S> for Layer
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else {
            return;
        };
        let enclosing = span.parent().and_then(|parent| place(&parent));
        let mut open = Open::new(span.name(), enclosing);
        attributes.record(&mut open);
        span.extensions_mut().insert(open);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else {
            return;
        };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            values.record(open);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let open = context
            .span(&id)
            .and_then(|span| span.extensions_mut().remove::<Open>());
        if let Some(ended) = open.and_then(Open::close) {
            self.0.push(ended);
        }
    }
}

fn place<'a, R: LookupSpan<'a>>(span: &SpanRef<'a, R>) -> Option<Place> {
    span.extensions().get::<Open>()?.place()
}

/// Where the innermost span stands that this runs in and that is exported.
pub(super) fn innermost() -> Option<Place> {
    let place = Span::current().with_subscriber(|(id, dispatch)| {
        let registry: &Registry = dispatch.downcast_ref()?;
        let mut scope = registry.span(id)?.scope();
        scope.find_map(|span| place(&span))
    });
    place.flatten()
}

/// Changes a span that has not ended, where it is looked at here.
pub(super) fn change(span: &Span, change: impl FnOnce(&mut Open)) {
    span.with_subscriber(|(id, dispatch)| {
        let registry: &Registry = dispatch.downcast_ref()?;
        let span = registry.span(id)?;
        span.extensions_mut().get_mut::<Open>().map(change)
    });
}
