//! Turns spans of `tracing` into OpenTelemetry's, kept as extensions in the registry.

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
    open::{OpenSpan, SpanContext},
};

/// A layer that queues each span at its end, and never blocks.
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
        let enclosing = span.parent().and_then(|parent| context_of(&parent));
        let mut open = OpenSpan::new(span.name(), enclosing);
        attributes.record(&mut open);
        span.extensions_mut().insert(open);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else {
            return;
        };
        if let Some(open) = span.extensions_mut().get_mut::<OpenSpan>() {
            values.record(open);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let open = context
            .span(&id)
            .and_then(|span| span.extensions_mut().remove::<OpenSpan>());
        if let Some(ended) = open.and_then(OpenSpan::close) {
            self.0.push(ended);
        }
    }
}

fn context_of<'a, R: LookupSpan<'a>>(span: &SpanRef<'a, R>) -> Option<SpanContext> {
    span.extensions().get::<OpenSpan>()?.context()
}

/// Returns the exported span in which the caller runs.
pub(super) fn current_context() -> Option<SpanContext> {
    let context = Span::current().with_subscriber(|(id, dispatch)| {
        let registry: &Registry = dispatch.downcast_ref()?;
        let mut scope = registry.span(id)?.scope();
        scope.find_map(|span| context_of(&span))
    });
    context.flatten()
}

/// Updates the exported part of a span, unless this layer does not track the span.
pub(super) fn update_span(span: &Span, update: impl FnOnce(&mut OpenSpan)) {
    span.with_subscriber(|(id, dispatch)| {
        let registry: &Registry = dispatch.downcast_ref()?;
        let span = registry.span(id)?;
        span.extensions_mut().get_mut::<OpenSpan>().map(update)
    });
}
