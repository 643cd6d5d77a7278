//! If all combinations are too many, every pair of values occurs in one.

use std::collections::BTreeSet;

type Cell = (usize, usize);

/// `sizes` are the columns' numbers of values.
pub(crate) fn every(sizes: &[usize]) -> Vec<Vec<usize>> {
    let longer = |rows: Vec<Vec<usize>>, size: &usize| {
        let with = |row: &Vec<usize>, value| row.iter().copied().chain([value]).collect();
        let rows = rows
            .iter()
            .flat_map(|row| (0..*size).map(move |value| with(row, value)));
        rows.collect()
    };
    sizes.iter().fold(vec![Vec::new()], longer)
}

/// Every value of a column meets every value of every other one.
///
/// Each row starts with a pair that has not met, and takes for other columns the value with the most new meetings.
/// The result is deterministic.
pub(crate) fn pairwise(sizes: &[usize]) -> Vec<Vec<usize>> {
    let mut open = pairs(sizes);
    let mut rows = Vec::new();
    while let Some((first, second)) = open.first().copied() {
        let mut row: Vec<Cell> = vec![first, second];
        for (column, size) in sizes.iter().enumerate() {
            if column == first.0 || column == second.0 {
                continue;
            }
            let gain = |value: &usize| {
                row.iter()
                    .filter(|cell| open.contains(&pair(**cell, (column, *value))))
                    .count()
            };
            // The last of equal values: first ones start rows already.
            let best = (0..*size).max_by_key(gain).unwrap();
            row.push((column, best));
        }
        row.sort_unstable();
        open.retain(|(one, other)| !(row.contains(one) && row.contains(other)));
        rows.push(row.into_iter().map(|(_, value)| value).collect());
    }
    rows
}

fn pair(one: Cell, other: Cell) -> (Cell, Cell) {
    (one.min(other), one.max(other))
}

fn pairs(sizes: &[usize]) -> BTreeSet<(Cell, Cell)> {
    let cells = |column: usize| (0..sizes[column]).map(move |value| (column, value));
    let columns = (0..sizes.len()).flat_map(|other| (0..other).map(move |one| (one, other)));
    let pairs = columns.flat_map(|(one, other)| {
        cells(one).flat_map(move |cell| cells(other).map(move |more| (cell, more)))
    });
    pairs.collect()
}

#[test]
fn every_pair_of_values_stands_in_a_combination_and_there_are_few() {
    for sizes in [
        &[3, 3, 3, 2, 2, 2, 2, 2, 2, 2][..],
        &[1, 3, 2],
        &[4, 5],
        &[2; 12],
    ] {
        let rows = pairwise(sizes);
        for ((one, value), (other, more)) in pairs(sizes) {
            let holds = |row: &&Vec<usize>| row[one] == value && row[other] == more;
            assert!(
                rows.iter().any(|row| holds(&row)),
                "{sizes:?}: {one}={value} {other}={more}"
            );
        }
        let is_row = |row: &Vec<usize>| {
            row.len() == sizes.len() && row.iter().zip(sizes).all(|(value, size)| value < size)
        };
        assert!(rows.iter().all(is_row), "{rows:?}");
        let least = sizes.iter().max().unwrap().pow(2);
        assert!(rows.len() <= 3 * least, "{sizes:?}: {}", rows.len());
    }
}

#[test]
fn all_combinations_are_all_and_none_is_there_twice() {
    let rows = every(&[3, 2, 2]);
    let distinct: BTreeSet<_> = rows.iter().collect();
    assert_eq!((rows.len(), distinct.len()), (12, 12));
}
